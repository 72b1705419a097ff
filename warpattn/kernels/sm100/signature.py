"""What Triton compiles for a Blackwell prefill: the kernel with the types of its parameters; needs no GPU."""

from typing import Any

from triton.experimental.gluon import GluonASTSource

from warpattn.language.nodes import Program
from warpattn.problem.element import FP32, Element
from warpattn.problem.scales import scale_types

from ..pieces.signature import modifier_functions, tensor_signature
from .config import FA4Config
from .kernel import prefill_kernel
from .layouts import box_layout, element_type, halved_columns, halved_rows, query_box
from .sequence_args import Shape, sequence_types
from .traits import LEAST_ROWS, STORE_COLUMNS, Traits

ALIGNED = [["tt.divisibility", 16]]


def prefill_source(config: FA4Config, traits: Traits, mask: Program, score: Program | None) -> GluonASTSource:
    """The kernel of a config with the types of its parameters and its constants."""
    out, columns = (FP32, 32) if config.splitk_partitions > 1 else (config.element, STORE_COLUMNS)
    copied = config.box_rows < LEAST_ROWS
    rows, cols = halved_rows(config), halved_columns(config)
    ragged, sequences = traits.ragged_queries, traits.kind != "dense"

    def keys(columns: int, halved: int | None, clipped: bool) -> str:
        box = [1, config.box_rows, 1, columns]
        return config.element.pointer if copied else descriptor(box, config.stored, halved, clipped)

    signature = {
        "q_desc": descriptor(query_box(config, config.BK0), config.element, rows, ragged),
        "k_desc": keys(config.BK0, rows, sequences),
        "v_desc": keys(config.padded_ov_depth, cols, not config.pair_cta),
        "o_desc": descriptor(query_box(config, columns), out, rows, ragged),
        "lse_ptr": "*fp32",
        "sinks_ptr": "*fp32",
        "scale": scale_types(config.eight_bit),
        "shape": Shape(),
        "sequence_args": sequence_types(traits.kind, copied, config.pair_cta),
        **modifier_types(mask, score),
    }
    constants = {"config": config, "functions": modifier_functions(mask, score), "traits": traits}
    return GluonASTSource(prefill_kernel, signature, constants, {(1,): ALIGNED, (2,): ALIGNED} if copied else {})


def descriptor(box: list[int], element: Element, halved: int | None, clipped: bool) -> str:
    """The type of a tensor map in boxes; with `clipped`, a map of sequences, which has a dimension more."""
    box = [1, *box] if clipped else box
    return f"tensordesc<{element.name}{box},{box_layout(box, element_type(element), halved)!r}>"


def modifier_types(mask: Program, score: Program | None) -> dict[str, Any]:
    """The types of the last parameters: captured tensors, and constants."""
    constants = dict.fromkeys(("config", "functions", "traits"), "constexpr")
    return {"mask_args": tensor_signature(mask, "sm100"), "score_args": tensor_signature(score, "sm100")} | constants
