"""What Triton compiles for one config, mask and score of decode on Hopper; mla/signature.py shares the parameters."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import GluonASTSource

from warpattn.language.nodes import Program
from warpattn.problem.scales import ScaleRows

from ...nvidia.arguments import int32_fields, strided_types
from ...pieces.signature import packed_span
from ..layouts import element_type, tile_layout
from ..signature import Features, attention_source
from .arguments import ColumnScaledRows, DecodeShape, KeyIndex, MappedRows, PartialResults, ScaledQueries, ScaledRows
from .combine import decode_combine_kernel
from .config import DecodeConfig, StreamConfig
from .kernel import decode_kernel


def decode_source(config: DecodeConfig, mask: Program, score: Program | None, has_sinks: bool, has_lse: bool):
    """The kernel with the types of its parameters and its constants."""
    features = Features(mask, score, has_sinks, has_lse)
    return stream_source(decode_kernel, config, config.padded_qk, config.padded_v, features)


def stream_source(
    kernel: Any,
    config: StreamConfig,
    k_columns: int,
    v_columns: int,
    features: Features,
    v: ColumnScaledRows | None = None,
):
    """A kernel with the parameters of decode, whose copies of keys and values have so many columns; `v`: the types of
    values that are others."""
    rows = strided_types(config.element.pointer)

    def key_rows(cols: int, operand: str) -> tuple[str, ...]:
        layout = tile_layout(config.box, cols, element_type(config.stored))
        descriptor = f"tensordesc<{config.stored.name}[1, {config.box}, 1, {cols}],{layout!r}>"
        if config.eight_bit is not None:
            by_columns = config.eight_bit.columns(operand) > 0
            scaled = ScaledRows(descriptor, "*fp32", "i64", "i64", "i64")
            return ColumnScaledRows(*scaled, "i64") if by_columns else scaled
        return rows if config.gathers else MappedRows(descriptor)

    q: tuple[Any, ...] = rows
    if config.eight_bit is not None and config.eight_bit.queries:
        q = ScaledQueries(*strided_types(config.stored.pointer), ScaleRows("*fp32", "i64", "i64", "i64"))
    signature = {"k": key_rows(k_columns, "k"), "v": v or key_rows(v_columns, "v"), "q": q, **_shared_signature(config)}
    aligned = ("q", "out", "workspace", *(("k", "v") if config.gathers else ()))
    return attention_source(kernel, config, _packed(features), signature, aligned)


def combine_source(config: StreamConfig, mask: Program, has_sinks: bool, has_lse: bool) -> GluonASTSource:
    """The same for the kernel that adds up parts."""
    features = _packed(Features(mask, None, has_sinks, has_lse))
    return attention_source(decode_combine_kernel, config, features, _shared_signature(config), ("out", "workspace"))


def _shared_signature(config: StreamConfig) -> dict[str, Any]:
    """Parameters of all kernels."""
    return {
        "out": strided_types(config.element.pointer),
        "keys": KeyIndex("*i32", "*i32", "i64", "*i32"),
        "workspace": PartialResults("*fp32", "*fp32", "i32", "*i32", "*i32"),
        "shape": int32_fields(DecodeShape),
    }


def _packed(features: Features) -> Features:
    """A row tile holds several heads: one span for all."""
    return features._replace(mask=packed_span(features.mask))
