"""What every operation does. Importing this package fills the table of `registry`."""

from . import arith, asm, control, copies, hopper, memory, reduce, shape

__all__ = ["arith", "asm", "control", "copies", "hopper", "memory", "reduce", "shape"]
