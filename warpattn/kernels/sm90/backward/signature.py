"""What Triton compiles for the kernels of the Hopper backward that no other architecture has."""

from __future__ import annotations

from triton.experimental.gluon import GluonASTSource

from warpattn.language.derivative import Adjoint
from warpattn.language.nodes import Program

from ...nvidia.arguments import int32_fields, strided_types
from ...nvidia.backward.arguments import Statistics
from ...nvidia.backward.signature import backward_source, kernel_source
from ...pieces.codegen import INDEX_SYMBOLS, SCORE_SYMBOLS, compile_function
from ...pieces.signature import modifier_functions, tensor_signature
from .captured import captured_kernel
from .config import AdjointFunctions, BackwardConfig, CapturedShape
from .kernel import start_roles


def main_source(config: BackwardConfig, mask: Program, score: Program | None, slope: Program | None) -> GluonASTSource:
    """The main kernel for a mask, a score and the score's derivative (None: 1)."""
    return backward_source(config, (mask, score, slope), "sm90", start_roles)


def captured_source(
    config: BackwardConfig, mask: Program, score: Program, adjoints: tuple[Adjoint, ...], has_dlse: bool
) -> GluonASTSource:
    """The kernel for gradients of what a score captured."""
    signature = {
        "reads": (strided_types(config.element.pointer),) * 4, "statistics": Statistics("*fp32", "*fp32", "*fp32"),
        "sums": ("*fp32",) * len(adjoints), "cu_q": "*i32", "cu_k": "*i32", "scale": "fp32",
        "shape": int32_fields(CapturedShape), "mask_args": tensor_signature(mask, "sm90"),
        "score_args": tensor_signature(score, "sm90"),
    }  # fmt: skip
    functions = tuple(_adjoint_functions(adjoint, score) for adjoint in adjoints)
    constants = {"config": config, "functions": modifier_functions(mask, score), "adjoints": functions}
    return kernel_source(captured_kernel, signature, constants | {"has_dlse": has_dlse})


def _adjoint_functions(adjoint: Adjoint, score: Program) -> AdjointFunctions:
    """An adjoint's Gluon functions."""
    ranks = tuple(tensor.ndim for tensor in score.tensors)
    index = tuple(compile_function((node,), INDEX_SYMBOLS, ranks) for node in adjoint.index)
    symbols = adjoint.symbols
    by_row, by_key = (bool(symbols & {name, "s"}) for name in "qk")
    apart = {node[2] for node in adjoint.index if node[0] == "sym"} >= {"q", "k"}
    value = compile_function((adjoint.value,), SCORE_SYMBOLS, ranks)
    sizes = sum(1 + 2 * rank for rank in ranks[: adjoint.slot]) + 1
    return AdjointFunctions(value, index, sizes, by_row, by_key, not apart)
