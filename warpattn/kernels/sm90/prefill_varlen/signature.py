"""What Triton compiles for ragged and paged prefill on Hopper."""

from collections.abc import Mapping
from typing import Any

from triton.experimental.gluon import GluonASTSource

from warpattn.language.nodes import Program
from warpattn.problem.operands import Features

from ...nvidia.clipped_rows import tile_box
from ...nvidia.order_kernel import order_kernel
from ...pieces.signature import captured_types, kernel_source, modifier_functions
from ..partial_rows import box_heads
from ..prefill.context import output_type
from ..prefill.eight_bit.rings import query_type, stored_type
from ..signature import attention_source, map_types
from .config import OrderTiles, VarlenConfig
from .kernel import prefill_varlen_kernel


def order_source(args: Mapping[str, Any], tiles: OrderTiles, mask: Program) -> GluonASTSource:
    """Source of the kernel that lists the query blocks."""
    constants = {"span": modifier_functions(mask, None).span, **tiles._asdict()}
    return kernel_source(order_kernel, args, constants, captured_types(mask, None, "sm90"))


def prefill_varlen_source(args: Mapping[str, Any], config: VarlenConfig, features: Features) -> GluonASTSource:
    """Source of the attention kernel."""
    tiles = config.tiles

    def maps(rows: int, widths: tuple[int, ...], packed: int, dtype: Any) -> tuple[str, ...]:
        return map_types([tile_box(rows, cols, True, packed) for cols in widths], dtype)

    given = {
        "q_maps": maps(tiles.rows, tiles.qk_parts, box_heads(tiles), query_type(tiles)),
        "o_maps": maps(tiles.rows, tiles.store_parts, box_heads(tiles), output_type(tiles)),
    }
    stored, copied = stored_type(tiles), config.page_size and not config.box
    if not copied:
        given["k_source.map"] = maps(config.box, tiles.qk_parts, 1, stored)
        given["v_source.map"] = maps(config.box, tiles.v_parts, 1, stored)
    if tiles.products:
        given["v_source.map"] = maps(tiles.v_rows, tiles.v_columns, 1, stored)
    aligned = ("k_source.pointer", "v_source.pointer") if copied else ()
    return attention_source(prefill_varlen_kernel, args, config, features, given, aligned)
