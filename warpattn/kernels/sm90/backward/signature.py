"""What Triton compiles for the kernels of the Hopper backward that no other architecture has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triton.experimental.gluon import GluonASTSource

from warpattn.language.derivative import Adjoint
from warpattn.language.nodes import Program

from ...nvidia.backward.arguments import BackwardPrograms
from ...nvidia.backward.signature import backward_source
from ...pieces.codegen import INDEX_SYMBOLS, SCORE_SYMBOLS, compile_function
from ...pieces.signature import captured_types, kernel_source, modifier_functions
from .captured import captured_kernel
from .config import AdjointFunctions, BackwardConfig
from .kernel import start_roles


def main_source(args: Mapping[str, Any], config: BackwardConfig, programs: BackwardPrograms) -> GluonASTSource:
    """The main kernel of a launch with `args`."""
    return backward_source(args, config, programs, "sm90", start_roles)


def captured_source(
    args: Mapping[str, Any], config: BackwardConfig, mask: Program, score: Program, adjoints: tuple[Adjoint, ...],
    has_dlse: bool,
) -> GluonASTSource:  # fmt: skip
    """The kernel for gradients of what a score captured."""
    functions = tuple(_adjoint_functions(adjoint, score) for adjoint in adjoints)
    constants = {"config": config, "functions": modifier_functions(mask, score), "adjoints": functions}
    return kernel_source(
        captured_kernel, args, constants | {"has_dlse": has_dlse}, captured_types(mask, score, "sm90")
    )


def _adjoint_functions(adjoint: Adjoint, score: Program) -> AdjointFunctions:
    """An adjoint's Gluon functions."""
    ranks = tuple(tensor.ndim for tensor in score.tensors)
    index = tuple(compile_function((node,), INDEX_SYMBOLS, ranks) for node in adjoint.index)
    symbols = adjoint.symbols
    by_row, by_key = (bool(symbols & {name, "s"}) for name in "qk")
    apart = {node.value for node in adjoint.index if node.op == "sym"} >= {"q", "k"}
    value = compile_function((adjoint.value,), SCORE_SYMBOLS, ranks)
    sizes = sum(1 + 2 * rank for rank in ranks[: adjoint.slot]) + 1
    return AdjointFunctions(value, index, sizes, by_row, by_key, not apart)
