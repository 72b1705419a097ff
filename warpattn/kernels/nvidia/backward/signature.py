"""What Triton compiles for the kernels of a backward, with argument types and constants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triton.experimental.gluon import GluonASTSource
from triton.experimental.gluon import language as gl

from warpattn.language.derivative import Adjoint
from warpattn.language.nodes import Program

from ...pieces.codegen import INDEX_SYMBOLS, SCORE_SYMBOLS, compile_function
from ...pieces.element_type import element_type
from ...pieces.signature import ALIGNED, captured_types, kernel_source, modifier_functions, with_slope
from ..clipped_rows import tile_box
from .arguments import AdjointFunctions, BackwardPrograms, CapturedPrograms, DeviceCode
from .captured import captured_kernel
from .finish import finish_kernel
from .kernel import backward_kernel
from .key_tiles import key_tiles_kernel
from .prepare import prepare_kernel
from .tiles import BackwardTiles
from .visits import row_numbers_layout


def backward_source(
    args: Mapping[str, Any], config: BackwardTiles, programs: BackwardPrograms, arch: str, code: DeviceCode
) -> GluonASTSource:
    """Source of the main kernel for a launch with `args`, with the roles of an architecture."""
    mask, score, slope = programs
    functions = with_slope(modifier_functions(mask, score), slope)
    constants = {"config": config, "functions": functions, "code": code}
    return kernel_source(backward_kernel, args, constants, captured_types(mask, score, arch) | _map_types(config))


def _map_types(config: BackwardTiles) -> dict[str, str]:
    """The types of all tensor maps."""
    qk, v, field = config.box(config.padded_qk), config.box(config.padded_v), ".map" if config.ragged else ""
    boxes = {
        "reads.0": (config.block_m, qk), "reads.1": (config.rows, qk), "reads.2": (config.rows, v),
        "reads.3": (config.block_m, v), "writes.0": (config.rows, qk), "writes.1": (config.rows, v),
    }  # fmt: skip
    numbers = f"tensordesc<fp32[1, {config.block_m}],{row_numbers_layout()!r}>"
    sums = gl.NVMMASharedLayout.get_default_for([1, config.dq_rows, config.dq_cols], gl.float32)
    return {
        **{path + field: _rows(config, *box) for path, box in boxes.items()},
        "writes.2": f"tensordesc<fp32[1, {config.dq_rows}, {config.dq_cols}],{sums!r}>",
        "numbers.0": numbers, "numbers.1": numbers,
    }  # fmt: skip


def _rows(config: BackwardTiles, count: int, cols: int) -> str:
    """The type of a tensor map with boxes of `count` rows and `cols` columns."""
    box = list(tile_box(count, cols, config.ragged))
    layout = gl.NVMMASharedLayout.get_default_for(box, element_type(config.element))
    return f"tensordesc<{config.element.name}{box},{layout!r}>"


def prepare_source(
    args: Mapping[str, Any], config: BackwardTiles, has_dlse: bool, has_sinks: bool
) -> GluonASTSource:
    """Source of the kernel before the main one."""
    constants = {"config": config, "has_dlse": has_dlse, "has_sinks": has_sinks}
    aligned = ("out.pointer", "dout.pointer", "made.dq")
    return kernel_source(prepare_kernel, args, constants, hints=dict.fromkeys(aligned, ALIGNED))


def finish_source(args: Mapping[str, Any], config: BackwardTiles, has_sinks: bool) -> GluonASTSource:
    """Source of the kernel after the main one."""
    constants, aligned = {"config": config, "has_sinks": has_sinks}, ("dq.pointer", "sums.dq")
    return kernel_source(finish_kernel, args, constants, hints=dict.fromkeys(aligned, ALIGNED))


def key_tiles_source(args: Mapping[str, Any], config: BackwardTiles) -> GluonASTSource:
    """Source of the kernel that lists the key tiles of packed sequences."""
    return kernel_source(key_tiles_kernel, args, {"config": config})


def captured_source(
    args: Mapping[str, Any], config: BackwardTiles, programs: CapturedPrograms, has_dlse: bool, arch: str,
    code: DeviceCode,
) -> GluonASTSource:  # fmt: skip
    """Source of the kernel for gradients of captured tensors, with the products of an architecture."""
    mask, score, adjoints = programs
    constants = {
        "config": config, "functions": modifier_functions(mask, score), "products": code.products, "has_dlse": has_dlse,
        "adjoints": tuple(_adjoint_functions(adjoint, score) for adjoint in adjoints),
    }  # fmt: skip
    return kernel_source(captured_kernel, args, constants, captured_types(mask, score, arch))


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
