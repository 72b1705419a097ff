"""What Triton compiles for the backward of gfx942 and gfx950: the kernels with the types of their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triton.experimental.gluon import GluonASTSource

from ...pieces.signature import captured_types, kernel_source, with_slope
from ..arithmetic import CDNA
from ..signature import HINTS, cdna_functions
from .config import BackwardPrograms, BackwardTraits, SideConfig
from .kernel import keys_kernel, queries_kernel, sinks_kernel

KERNELS = {"queries": queries_kernel, "keys": keys_kernel}
RESULTS = {"queries": ("out", "results.dq"), "keys": ("results.dk", "results.dv", "numbers.top", "numbers.delta")}


def side_source(
    args: Mapping[str, Any], config: SideConfig, traits: BackwardTraits, programs: BackwardPrograms
) -> GluonASTSource:
    """The kernel of one side of a launch with `args`."""
    mask, score, slope = programs
    constants = {"config": config, "functions": with_slope(cdna_functions(mask, score), slope, CDNA), "traits": traits}
    pointers = (*(f"reads.{name}" for name in ("q", "k", "v", "dout")), *RESULTS[config.side])
    types = captured_types(mask, score, config.arch)
    return kernel_source(KERNELS[config.side], args, constants, types, dict.fromkeys(pointers, HINTS))


def sinks_source(args: Mapping[str, Any]) -> GluonASTSource:
    """The kernel that adds up the parts of the sinks' gradients."""
    return kernel_source(sinks_kernel, args, {})
