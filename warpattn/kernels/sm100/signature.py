"""What Triton compiles for a Blackwell prefill: the kernel with the types of its arguments; needs no GPU."""

from collections.abc import Mapping
from typing import Any

from triton.experimental.gluon import GluonASTSource

from warpattn.language.nodes import Program
from warpattn.problem.element import Element

from ..pieces.signature import ALIGNED, captured_types, kernel_source, modifier_functions
from .config import FA4Config
from .kernel import prefill_kernel
from .layouts import box_layout, element_type, halved_columns, halved_rows, query_box
from .traits import LEAST_ROWS, Traits


def prefill_source(
    args: Mapping[str, Any], config: FA4Config, traits: Traits, mask: Program, score: Program | None
) -> GluonASTSource:
    """The kernel of a launch with `args`."""
    rows, cols = halved_rows(config), halved_columns(config)
    ragged, sequences = traits.ragged_queries, traits.kind != "dense"
    given: dict[str, Any] = {
        "q_desc": map_type(query_box(config, config.BK0), config.element, rows, ragged),
        "o_desc": map_type(query_box(config, config.store_columns), config.written, rows, ragged),
        **captured_types(mask, score, "sm100"),
    }
    if config.box_rows >= LEAST_ROWS:
        k_box, v_box = ([1, config.box_rows, 1, n] for n in (config.BK0, config.padded_ov_depth))
        given["k_desc"] = map_type(k_box, config.stored, rows, sequences)
        given["v_desc"] = map_type(v_box, config.stored, cols, not config.pair_cta)
    constants = {"config": config, "functions": modifier_functions(mask, score), "traits": traits}
    hints = copied_rows(config.box_rows) | addressed_rows(args["recompute_args"])
    return kernel_source(prefill_kernel, args, constants, given, hints)


def addressed_rows(x: Any) -> dict[str, Any]:
    """What is known of the pointers in `RecomputeArgs` or `KeyAddresses`."""
    return {f"recompute_args.{name}.pointer": ALIGNED for name in ("q", "k", "v", "out") if hasattr(x, name)}


def map_type(box: list[int], element: Element, halved: int | None, clipped: bool) -> str:
    """The type of a tensor map in boxes; with `clipped`, a map of sequences, which has a dimension more."""
    box = [1, *box] if clipped else box
    return f"tensordesc<{element.name}{box},{box_layout(box, element_type(element), halved)!r}>"


def copied_rows(box_rows: int) -> dict[str, Any]:
    """What is known of keys and values where no map has boxes of so few rows, and threads copy them."""
    return dict.fromkeys(("k_desc", "v_desc") if box_rows < LEAST_ROWS else (), ALIGNED)
