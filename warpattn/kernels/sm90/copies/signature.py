"""What Triton compiles for the kernel that copies K and V on Hopper."""

from collections.abc import Mapping
from typing import Any

from triton.experimental.gluon import GluonASTSource

from ...pieces.signature import ALIGNED, kernel_source
from .config import CopiedRows
from .kernel import copy_kernel
from .places import copy_places_kernel, places_kernel

HINTS = dict.fromkeys(("k.rows.pointer", "v.rows.pointer", "k_out", "v_out"), ALIGNED)


def copy_source(args: Mapping[str, Any], kinds: tuple[CopiedRows, CopiedRows]) -> GluonASTSource:
    """The kernel's source for a launch with `args`; kinds: those of K and of V."""
    constants = {"k_kind": kinds[0], "v_kind": kinds[1]}
    return kernel_source(copy_kernel, args, constants, hints=HINTS)


def places_source(args: Mapping[str, Any], masked: bool) -> GluonASTSource:
    """Source of the kernel that lists the places of a step's keys."""
    return kernel_source(places_kernel, args, {"masked": masked})


def copy_places_source(args: Mapping[str, Any], kinds: tuple[CopiedRows, CopiedRows]) -> GluonASTSource:
    """Source of the kernel that fills these places; kinds: those of K and of V."""
    return kernel_source(copy_places_kernel, args, {"k_kind": kinds[0], "v_kind": kinds[1]}, hints=HINTS)
