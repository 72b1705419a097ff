"""What Triton compiles for the backward of gfx942 and gfx950: the kernels with the types of their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from triton.experimental.gluon import GluonASTSource

from warpattn.language.nodes import Program

from ...pieces.codegen import SCORE_SYMBOLS, compile_function
from ...pieces.signature import captured_types, kernel_source, modifier_functions
from ..arithmetic import CDNA
from ..signature import HINTS, keep_functions
from .config import BackwardPrograms, BackwardTraits, SideConfig
from .kernel import keys_kernel, queries_kernel, sinks_kernel

KERNELS = {"queries": queries_kernel, "keys": keys_kernel}
RESULTS = {"queries": ("out", "results.dq"), "keys": ("results.dk", "results.dv", "numbers.top", "numbers.delta")}


class BackwardFunctions(NamedTuple):
    """A mask's conditions and span, a score and its derivative as Gluon functions; slope None: 1."""

    keep: tuple[Any, ...]
    span: Any
    score: Any
    slope: Any


def side_source(
    args: Mapping[str, Any], config: SideConfig, traits: BackwardTraits, programs: BackwardPrograms
) -> GluonASTSource:
    """The kernel of one side of a launch with `args`."""
    mask, score, slope = programs
    found = modifier_functions(mask, score, CDNA)
    keep = () if found.keep is None else keep_functions(mask)
    functions = BackwardFunctions(keep, found.span, found.score, _slope_function(slope))
    constants = {"config": config, "functions": functions, "traits": traits}
    pointers = (*(f"reads.{name}" for name in ("q", "k", "v", "dout")), *RESULTS[config.side])
    types = captured_types(mask, score, config.arch)
    return kernel_source(KERNELS[config.side], args, constants, types, dict.fromkeys(pointers, HINTS))


def _slope_function(slope: Program | None) -> Any:
    """The derivative of the score as a Gluon function; None without one."""
    if slope is None:
        return None
    return compile_function(slope.outputs, SCORE_SYMBOLS, tuple(tensor.ndim for tensor in slope.tensors), CDNA)


def sinks_source(args: Mapping[str, Any]) -> GluonASTSource:
    """The kernel that adds up the parts of the sinks' gradients."""
    return kernel_source(sinks_kernel, args, {})
