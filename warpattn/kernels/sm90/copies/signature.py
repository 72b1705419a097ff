"""What Triton compiles for copies of keys and values on Hopper."""

from collections.abc import Mapping
from typing import Any

from triton.experimental.gluon import GluonASTSource

from ...pieces.signature import ALIGNED, kernel_source
from .kernel import copy_kernel


def copy_source(args: Mapping[str, Any], k_cols: int, v_cols: int, paged: bool, ragged: bool) -> GluonASTSource:
    """The kernel of a launch with `args`."""
    hints = dict.fromkeys(("k.pointer", "v.pointer", "k_out", "v_out"), ALIGNED)
    constants = {"k_cols": k_cols, "v_cols": v_cols, "paged": paged, "ragged": ragged}
    return kernel_source(copy_kernel, args, constants, hints=hints)
