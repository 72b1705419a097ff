"""What Triton compiles for one config, mask and score of decode on Hopper; mla/signature.py shares the parameters."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import GluonASTSource

from warpattn.language.nodes import Program

from ...pieces.signature import modifier_functions, packed_span, tensor_signature
from ..arguments import int32_fields, strided_types
from ..layouts import element_type, tile_layout
from .arguments import DecodeShape, KeyIndex, MappedRows, PartialResults
from .combine import decode_combine_kernel
from .config import DecodeConfig, StreamConfig
from .kernel import decode_kernel


def decode_source(config: DecodeConfig, mask: Program, score: Program | None, has_sinks: bool, has_lse: bool):
    """The kernel with the types of its parameters and its constants."""
    columns = (config.padded_qk, config.padded_v)
    return stream_source(decode_kernel, config, columns, (mask, score), (has_sinks, has_lse))


def stream_source(
    kernel: Any,
    config: StreamConfig,
    columns: tuple[int, int],
    programs: tuple[Program, Program | None],
    features: tuple[bool, bool],
) -> GluonASTSource:
    """A kernel with the parameters of decode; columns: of a copy of keys and of values; programs: of mask and score;
    features: has_sinks, has_lse."""
    mask, score = programs
    rows = strided_types(config.element.pointer)

    def key_rows(cols: int):
        layout = tile_layout(config.box, cols, element_type(config.element))
        descriptor = f"tensordesc<{config.element.name}[1, {config.box}, 1, {cols}],{layout!r}>"
        return rows if config.gathers else MappedRows(descriptor)

    signature = {
        "k": key_rows(columns[0]),
        "v": key_rows(columns[1]),
        "q": rows,
        **_shared_signature(config, mask),
        "scale": "fp32",
        "score_args": tensor_signature(score, "sm90"),
    }
    aligned = ("q", "out", "workspace", *(("k", "v") if config.gathers else ()))
    return _source(kernel, signature, _constants(config, programs, features), aligned)


def combine_source(config: StreamConfig, mask: Program, has_sinks: bool, has_lse: bool) -> GluonASTSource:
    """The same for the kernel that adds up parts."""
    constants = _constants(config, (mask, None), (has_sinks, has_lse))
    return _source(decode_combine_kernel, _shared_signature(config, mask), constants, ("out", "workspace"))


def _shared_signature(config: StreamConfig, mask: Program) -> dict[str, Any]:
    """Parameters of all kernels."""
    return {
        "out": strided_types(config.element.pointer),
        "keys": KeyIndex("*i32", "*i32", "i64"),
        "workspace": PartialResults("*fp32", "*fp32", "i32", "*i32"),
        "lse_ptr": "*fp32",
        "sinks_ptr": "*fp32",
        "shape": int32_fields(DecodeShape),
        "mask_args": tensor_signature(mask, "sm90"),
    }


def _constants(
    config: StreamConfig, programs: tuple[Program, Program | None], features: tuple[bool, bool]
) -> dict[str, Any]:
    mask, score = programs
    has_sinks, has_lse = features
    functions = modifier_functions(packed_span(mask), score)
    return {"config": config, "functions": functions, "has_sinks": has_sinks, "has_lse": has_lse}


def _source(kernel: Any, signature: dict[str, Any], constants: dict[str, Any], aligned: tuple[str, ...]):
    """`aligned`: parameters that begin with a pointer to a multiple of 16 bytes. Types in the kernel's own order."""
    signature |= dict.fromkeys(constants, "constexpr")
    signature = {name: signature[name] for name in kernel.arg_names}
    hints = {(kernel.arg_names.index(name), 0): [["tt.divisibility", 16]] for name in aligned}
    return GluonASTSource(kernel, signature, constants, hints)
