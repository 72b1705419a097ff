"""Compiles the Hopper kernels of ragged batches and paged caches: types of their parameters and their constants."""

from typing import Any

from triton.experimental.gluon import GluonASTSource
from triton.experimental.gluon import language as gl

from warpattn.language.nodes import Program

from ...pieces.order_kernel import order_kernel
from ...pieces.signature import modifier_functions, tensor_signature
from ..layouts import element_type
from ..prefill.context import tile_box
from .config import Form
from .kernel import lengths_kernel

ALIGNED = [["tt.divisibility", 16]]


def order_source(form: Form, mask: Program) -> GluonASTSource:
    """The kernel that lists the query blocks."""
    _, span, _ = modifier_functions(mask, None)
    signature: dict[str, Any] = {
        "q_ptr": "*i32",
        "k_ptr": "*i32",
        "list_ptr": "*i32",
        "shape": ("i32",) * 4,
        "mask_args": tensor_signature(mask, "sm90"),
        "ragged": "constexpr",
        "span": "constexpr",
        "block_m": "constexpr",
        "block_n": "constexpr",
    }
    constants = {
        "ragged": form.page_size == 0,
        "span": span,
        "block_m": form.tiles.block_m,
        "block_n": form.tiles.block_n,
    }
    return GluonASTSource(order_kernel, signature, constants)


def lengths_source(form: Form, mask: Program, score: Program | None, has_sinks: bool, has_lse: bool) -> GluonASTSource:
    """The attention kernel."""
    tiles = form.tiles
    dtype = element_type(tiles.dtype)

    def descriptor(rows: int, cols: int) -> str:
        box = list(tile_box(rows, cols, True))
        return f"tensordesc<{tiles.dtype}{box},{gl.NVMMASharedLayout.get_default_for(box, dtype)!r}>"

    def keys(cols: int) -> tuple[str, ...]:
        if form.page_size and not form.box:
            return (f"*{tiles.dtype}", "i64", "i64", "i64")
        return (descriptor(form.box, cols), "i32", "i32")

    signature: dict[str, Any] = {
        "q_desc": descriptor(tiles.rows, tiles.padded_qk),
        "o_desc": descriptor(tiles.rows, tiles.store_cols),
        "k_source": keys(tiles.padded_qk),
        "v_source": keys(tiles.padded_v),
        "list_ptr": "*i32",
        "table_ptr": "*i32",
        "lse_ptr": "*fp32",
        "sinks_ptr": "*fp32",
        "scale": "fp32",
        "shape": ("i32",) * 11,
        "mask_args": tensor_signature(mask, "sm90"),
        "score_args": tensor_signature(score, "sm90"),
        "form": "constexpr",
        "functions": "constexpr",
        "has_sinks": "constexpr",
        "has_lse": "constexpr",
    }
    constants = {
        "form": form,
        "functions": modifier_functions(mask, score),
        "has_sinks": has_sinks,
        "has_lse": has_lse,
    }
    attributes = {} if form.box else {(2, 0): ALIGNED, (3, 0): ALIGNED}
    return GluonASTSource(lengths_kernel, signature, constants, attributes)
