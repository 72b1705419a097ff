"""What Triton compiles for decode on Hopper, and for latent attention, which has the same arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triton.experimental.gluon import GluonASTSource

from warpattn.problem.element import Element
from warpattn.problem.operands import Features

from ...nvidia.arguments import query_pointers
from ...pieces.combine_config import CombineTile
from ...pieces.signature import packed_span
from ..layouts import element_type, tile_layout
from ..signature import attention_source
from .combine import decode_combine_kernel
from .config import DecodeConfig, StreamConfig
from .kernel import decode_kernel


def decode_source(args: Mapping[str, Any], config: DecodeConfig, features: Features) -> GluonASTSource:
    """Source of the decode kernel for a launch with `args`."""
    maps = {
        "k.desc": rows_map(config, config.padded_qk, config.stored),
        "v.desc": rows_map(config, config.padded_v, config.stored),
    }
    return stream_source(decode_kernel, args, config, features, maps)


def stream_source(
    kernel: Any, args: Mapping[str, Any], config: StreamConfig, features: Features, maps: Mapping[str, str],
    aligned: tuple[str, ...] = (),
) -> GluonASTSource:  # fmt: skip
    """Source of a kernel with the parameters of decode. `maps`: types of its tensor maps of K and V by argument
    path; `aligned`: further pointers that are multiples of 16 bytes."""
    rows = ("k.pointer", "v.pointer") if config.gathers else ()
    aligned = (*query_pointers(args["q"]), "out.pointer", "workspace.o", *rows, *aligned)
    return attention_source(kernel, args, config, _packed(features), maps, aligned)


def combine_source(
    args: Mapping[str, Any], config: StreamConfig, tile: CombineTile, features: Features
) -> GluonASTSource:
    """Source of the kernel that combines parts."""
    features = _packed(features._replace(score=None))
    aligned = ("out.pointer", "workspace.o")
    return attention_source(decode_combine_kernel, args, config, features, {}, aligned, {"tile": tile})


def rows_map(config: StreamConfig, cols: int, element: Element) -> str:
    """The type of a tensor map of K or V whose boxes have `cols` columns."""
    layout = tile_layout(config.box, cols, element_type(element))
    return f"tensordesc<{element.name}[1, {config.box}, 1, {cols}],{layout!r}>"


def _packed(features: Features) -> Features:
    """The features with one span for all heads of a row tile."""
    return features._replace(mask=packed_span(features.mask))
