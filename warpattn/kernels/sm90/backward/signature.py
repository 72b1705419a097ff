"""What Triton compiles for the kernels of the Hopper backward."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental.gluon import GluonASTSource
from triton.experimental.gluon import language as gl

from warpattn.language.derivative import Adjoint
from warpattn.language.nodes import Program

from ...nvidia.clipped_map import ClippedMap
from ...pieces.codegen import INDEX_SYMBOLS, SCORE_SYMBOLS, compile_function
from ...pieces.signature import modifier_functions, tensor_signature
from ..arguments import int32_fields, strided_types
from ..columns import tile_box
from ..layouts import element_type
from ..signature import ALIGNED
from .captured import captured_kernel
from .config import (
    Added,
    AdjointFunctions,
    BackwardConfig,
    BackwardShape,
    CapturedShape,
    Prepared,
    RowShape,
    Sequences,
    Statistics,
    Turns,
)
from .context import row_numbers_layout
from .finish import finish_kernel
from .kernel import backward_kernel
from .key_tiles import key_tiles_kernel
from .prepare import prepare_kernel


class BackwardFunctions(NamedTuple):
    """`Functions` of a mask and a score, and the score's derivative as a Gluon function; None: 1."""

    keep: Any
    span: Any
    score: Any
    slope: Any


def backward_source(
    config: BackwardConfig, mask: Program, score: Program | None, slope: Program | None
) -> GluonASTSource:
    """The main kernel for a mask, a score and the score's derivative (None: 1)."""
    qk, v = config.padded_qk, config.padded_v
    sums = gl.NVMMASharedLayout.get_default_for([1, config.block_m, config.dq_cols], gl.float32)
    dq = f"tensordesc<fp32[1, {config.block_m}, {config.dq_cols}],{sums!r}>"
    numbers = f"tensordesc<fp32[1, {config.block_m}],{row_numbers_layout()!r}>"
    signature = {
        "reads": (
            _rows(config, config.block_m, qk), _rows(config, config.rows, qk), _rows(config, config.rows, v),
            _rows(config, config.block_m, v),
        ),
        "writes": (_rows(config, config.rows, qk), _rows(config, config.rows, v), dq),
        "numbers": (numbers, numbers),
        "turns": Turns("*i32", "i32"),
        "counter": "*i32",
        "sequences": Sequences("*i32", "*i32", "*i32"),
        "scale": "fp32",
        "shape": int32_fields(BackwardShape),
        "mask_args": tensor_signature(mask, "sm90"),
        "score_args": tensor_signature(score, "sm90"),
    }  # fmt: skip
    functions = BackwardFunctions(*modifier_functions(mask, score), slope_function(slope))
    return _source(backward_kernel, signature, {"config": config, "functions": functions})


def _rows(config: BackwardConfig, count: int, cols: int) -> str | ClippedMap:
    """The type of a tensor in boxes of `count` rows and `cols` columns."""
    box = list(tile_box(count, cols, config.ragged))
    layout = gl.NVMMASharedLayout.get_default_for(box, element_type(config.element))
    desc = f"tensordesc<{config.element.name}{box},{layout!r}>"
    return ClippedMap(desc, "i32", "i32") if config.ragged else desc


def slope_function(slope: Program | None) -> Any:
    """The derivative of the score as a Gluon function; None without one."""
    if slope is None:
        return None
    return compile_function(slope.outputs, SCORE_SYMBOLS, tuple(tensor.ndim for tensor in slope.tensors))


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
    return _source(captured_kernel, signature, constants | {"has_dlse": has_dlse})


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


def prepare_source(config: BackwardConfig, has_dlse: bool, has_sinks: bool) -> GluonASTSource:
    """The kernel before the main one."""
    tensor = strided_types(config.element.pointer)
    signature = {
        "out": tensor, "dout": tensor, "statistics": Statistics("*fp32", "*fp32", "*fp32"),
        "made": Prepared(*["*fp32"] * 4, "*i32"), "cu_q": "*i32", "unit": "fp32", "shape": int32_fields(RowShape),
    }  # fmt: skip
    constants = {"config": config, "has_dlse": has_dlse, "has_sinks": has_sinks}
    aligned = [("out", 0), ("dout", 0), ("made", 2)]
    return _source(prepare_kernel, signature, constants, aligned)


def finish_source(config: BackwardConfig, has_sinks: bool) -> GluonASTSource:
    """The kernel after the main one."""
    signature = {
        "dq": strided_types(config.element.pointer), "sums": Added("*fp32", "*fp32"), "dsinks": "*fp32",
        "cu_q": "*i32", "scale": "fp32", "shape": int32_fields(RowShape),
    }  # fmt: skip
    return _source(finish_kernel, signature, {"config": config, "has_sinks": has_sinks}, [("dq", 0), ("sums", 0)])


def key_tiles_source(config: BackwardConfig) -> GluonASTSource:
    """The kernel that lists the key tiles of sequences end to end."""
    return _source(key_tiles_kernel, {"cu_k": "*i32", "tiles": "*i32", "batch": "i32"}, {"config": config})


def _source(
    kernel: Any, signature: dict[str, Any], constants: dict[str, Any], aligned: list[tuple[str, int]] | None = None
) -> GluonASTSource:
    """A kernel with its types and constants in its own order; `aligned`: fields that point to multiples of 16 bytes."""
    known = signature | dict.fromkeys(constants, "constexpr")
    hints = {(kernel.arg_names.index(name), field): ALIGNED for name, field in aligned or ()}
    return GluonASTSource(kernel, {name: known[name] for name in kernel.arg_names}, constants, hints)
