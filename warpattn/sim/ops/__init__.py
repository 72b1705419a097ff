"""Implements every operation. Importing this package fills the table of `registry`."""

from . import (
    amd,
    arith,
    asm,
    barriers,
    blackwell,
    control,
    copies,
    hopper,
    libdevice,
    memory,
    messages,
    reduce,
    scaled,
    shape,
)

__all__ = [
    "amd",
    "arith",
    "asm",
    "barriers",
    "blackwell",
    "control",
    "copies",
    "hopper",
    "libdevice",
    "memory",
    "messages",
    "reduce",
    "scaled",
    "shape",
]
