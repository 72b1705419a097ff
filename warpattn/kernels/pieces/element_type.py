"""Gluon's type of an `Element`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def element_type(element):
    """Gluon's type of an `Element` that kernels compute with, or of 8 bits that they convert."""
    types = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32}
    return (types | {"fp8e4nv": gl.float8e4nv, "fp8e5": gl.float8e5})[element.name]
