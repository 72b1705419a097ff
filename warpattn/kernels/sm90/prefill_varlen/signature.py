"""What Triton compiles for ragged batches and paged caches on Hopper: types of parameters and constants."""

from typing import Any

from triton.experimental.gluon import GluonASTSource

from warpattn.language.nodes import Program
from warpattn.problem.scales import scale_types

from ...nvidia.arguments import StridedRows, int32_fields, strided_types
from ...nvidia.boxes import tile_box
from ...nvidia.clipped_map import ClippedMap
from ...pieces.order_kernel import order_kernel
from ...pieces.scheduler_sizes import OrderShape
from ...pieces.signature import modifier_functions, tensor_signature
from ..prefill.context import output_type, query_type, stored_type
from ..signature import Features, attention_source, map_types
from .config import OrderTiles, VarlenConfig, VarlenShape
from .kernel import prefill_varlen_kernel


def order_source(tiles: OrderTiles, mask: Program) -> GluonASTSource:
    """The kernel that lists the query blocks."""
    constants = {"span": modifier_functions(mask, None).span, **tiles._asdict()}
    signature = {
        "q_ptr": "*i32",
        "k_ptr": "*i32",
        "list_ptr": "*i32",
        "shape": int32_fields(OrderShape),
        "mask_args": tensor_signature(mask, "sm90"),
        **dict.fromkeys(constants, "constexpr"),
    }
    return GluonASTSource(order_kernel, signature, constants)


def prefill_varlen_source(
    config: VarlenConfig, mask: Program, score: Program | None, has_sinks: bool, has_lse: bool
) -> GluonASTSource:
    """The attention kernel."""
    tiles = config.tiles

    def descriptors(rows: int, widths: tuple[int, ...], packed: int, dtype: Any) -> tuple[str, ...]:
        return map_types([tile_box(rows, cols, True, packed) for cols in widths], dtype)

    def keys(widths: tuple[int, ...]) -> ClippedMap | StridedRows:
        if config.page_size and not config.box:
            return strided_types(tiles.element.pointer)
        return ClippedMap(descriptors(config.box, widths, 1, stored_type(tiles)), "i32", "i32")

    def values() -> ClippedMap:
        return ClippedMap(descriptors(tiles.v_rows, tiles.v_columns, 1, stored_type(tiles)), "i32", "i32")

    signature = {
        "q_maps": descriptors(tiles.rows, tiles.qk_parts, tiles.packed, query_type(tiles)),
        "o_maps": descriptors(tiles.rows, tiles.store_parts, tiles.packed, output_type(tiles)),
        "k_source": keys(tiles.qk_parts),
        "v_source": values() if tiles.products else keys(tiles.v_parts),
        "list_ptr": "*i32",
        "table_ptr": "*i32",
        "scale": scale_types(tiles.eight_bit),
        "shape": int32_fields(VarlenShape),
    }
    features = Features(mask, score, has_sinks, has_lse, True)
    aligned = () if config.box else ("k_source", "v_source")
    return attention_source(prefill_varlen_kernel, config, features, signature, aligned)
