"""What Triton compiles for the kernel that copies K and V on Hopper."""

from collections.abc import Mapping
from typing import Any

from triton.experimental.gluon import GluonASTSource

from ...pieces.signature import ALIGNED, kernel_source
from .config import CopiedRows
from .kernel import copy_kernel


def copy_source(args: Mapping[str, Any], kinds: tuple[CopiedRows, CopiedRows], ragged: bool) -> GluonASTSource:
    """The kernel's source for a launch with `args`; kinds: those of K and of V."""
    hints = dict.fromkeys(("k.rows.pointer", "v.rows.pointer", "k_out", "v_out"), ALIGNED)
    constants = {"k_kind": kinds[0], "v_kind": kinds[1], "ragged": ragged}
    return kernel_source(copy_kernel, args, constants, hints=hints)
