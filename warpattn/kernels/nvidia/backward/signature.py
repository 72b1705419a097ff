"""What Triton compiles for the kernels of a backward."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental.gluon import GluonASTSource
from triton.experimental.gluon import language as gl

from warpattn.language.nodes import Program

from ...pieces.codegen import SCORE_SYMBOLS, compile_function
from ...pieces.element_type import element_type
from ...pieces.signature import modifier_functions, tensor_signature
from ..arguments import int32_fields, strided_types
from ..boxes import tile_box
from ..clipped_map import ClippedMap
from .arguments import Added, BackwardShape, Prepared, RowShape, Sequences, Statistics, Turns
from .finish import finish_kernel
from .kernel import backward_kernel
from .key_tiles import key_tiles_kernel
from .order import BackwardTiles
from .prepare import prepare_kernel
from .visits import row_numbers_layout

ALIGNED = [["tt.divisibility", 16]]


class BackwardFunctions(NamedTuple):
    """`Functions` of a mask and a score, and the score's derivative as a Gluon function; None: 1."""

    keep: Any
    span: Any
    score: Any
    slope: Any


def backward_source(
    config: BackwardTiles, programs: tuple[Program, Program | None, Program | None], arch: str, start_roles: Any
) -> GluonASTSource:
    """The main kernel for a mask, a score and the score's derivative (None: 1), with the roles of an architecture."""
    mask, score, slope = programs
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
        "mask_args": tensor_signature(mask, arch),
        "score_args": tensor_signature(score, arch),
    }  # fmt: skip
    functions = BackwardFunctions(*modifier_functions(mask, score), slope_function(slope))
    constants = {"config": config, "functions": functions, "start_roles": start_roles}
    return kernel_source(backward_kernel, signature, constants)


def _rows(config: BackwardTiles, count: int, cols: int) -> str | ClippedMap:
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


def prepare_source(config: BackwardTiles, has_dlse: bool, has_sinks: bool) -> GluonASTSource:
    """The kernel before the main one."""
    tensor = strided_types(config.element.pointer)
    signature = {
        "out": tensor, "dout": tensor, "statistics": Statistics("*fp32", "*fp32", "*fp32"),
        "made": Prepared(*["*fp32"] * 4, "*i32"), "cu_q": "*i32", "unit": "fp32", "shape": int32_fields(RowShape),
    }  # fmt: skip
    constants = {"config": config, "has_dlse": has_dlse, "has_sinks": has_sinks}
    aligned = [("out", 0), ("dout", 0), ("made", 2)]
    return kernel_source(prepare_kernel, signature, constants, aligned)


def finish_source(config: BackwardTiles, has_sinks: bool) -> GluonASTSource:
    """The kernel after the main one."""
    signature = {
        "dq": strided_types(config.element.pointer), "sums": Added("*fp32", "*fp32"), "dsinks": "*fp32",
        "cu_q": "*i32", "scale": "fp32", "shape": int32_fields(RowShape),
    }  # fmt: skip
    return kernel_source(finish_kernel, signature, {"config": config, "has_sinks": has_sinks}, [("dq", 0), ("sums", 0)])


def key_tiles_source(config: BackwardTiles) -> GluonASTSource:
    """The kernel that lists the key tiles of sequences end to end."""
    return kernel_source(key_tiles_kernel, {"cu_k": "*i32", "tiles": "*i32", "batch": "i32"}, {"config": config})


def kernel_source(
    kernel: Any, signature: dict[str, Any], constants: dict[str, Any], aligned: list[tuple[str, int]] | None = None
) -> GluonASTSource:
    """A kernel with its types and constants in its own order; `aligned`: fields that point to multiples of 16 bytes."""
    known = signature | dict.fromkeys(constants, "constexpr")
    hints = {(kernel.arg_names.index(name), field): ALIGNED for name, field in aligned or ()}
    return GluonASTSource(kernel, {name: known[name] for name in kernel.arg_names}, constants, hints)
