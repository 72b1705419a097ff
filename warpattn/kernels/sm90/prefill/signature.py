"""What Triton compiles for one config, mask and score of dense prefill on Hopper."""

from triton.experimental.gluon import GluonASTSource

from warpattn.language.nodes import Program

from ..arguments import int32_fields
from ..layouts import element_type, tile_layout
from ..signature import Features, attention_source
from .config import PrefillShape, SM90Config
from .kernel import prefill_kernel


def prefill_source(
    config: SM90Config, mask: Program, score: Program | None, has_sinks: bool, has_lse: bool
) -> GluonASTSource:
    """The kernel with the types of its parameters and its constants."""

    def descriptor(rows: int, cols: int) -> str:
        layout = tile_layout(rows, cols, element_type(config.element))
        return f"tensordesc<{config.element.name}[1, {rows}, 1, {cols}],{layout!r}>"

    signature = {
        "q_desc": descriptor(config.rows, config.padded_qk),
        "k_desc": descriptor(config.block_n, config.padded_qk),
        "v_desc": descriptor(config.block_n, config.padded_v),
        "o_desc": descriptor(config.rows, config.store_cols),
        "counter_ptr": "*i32",
        "shape": int32_fields(PrefillShape),
    }
    return attention_source(prefill_kernel, config, Features(mask, score, has_sinks, has_lse), signature)
