"""Gluon's type of an `Element`, and the order of 8-bit ones in an operand."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def element_type(element):
    """Gluon's type of an `Element` that kernels compute with, or of 8 bits that they convert."""
    types = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32}
    return (types | {"fp8e4nv": gl.float8e4nv, "fp8e5": gl.float8e5})[element.name]


@gluon.jit
def in_operand_order(place):
    """The key whose value goes to `place` of `quantized.transposed_values`, see sm90/prefill/eight_bit/weights.py."""
    return (place & ~15) + ((place & 2) << 2) + ((place & 12) >> 1) + (place & 1)
