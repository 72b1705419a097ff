"""What Triton compiles for one config, mask and score of dense prefill on Hopper."""

from triton.experimental.gluon import GluonASTSource
from triton.experimental.gluon import language as gl

from warpattn.language.nodes import Program

from ..arguments import int32_fields
from ..layouts import element_type
from ..signature import Features, attention_source
from .config import PrefillShape, SM90Config
from .context import tile_box
from .kernel import prefill_kernel


def prefill_source(
    config: SM90Config, mask: Program, score: Program | None, has_sinks: bool, has_lse: bool
) -> GluonASTSource:
    """The kernel with the types of its parameters and its constants."""

    def descriptor(rows: int, cols: int, packed: int = 1) -> str:
        box = list(tile_box(rows, cols, False, packed))
        layout = gl.NVMMASharedLayout.get_default_for(box, element_type(config.element))
        return f"tensordesc<{config.element.name}{box},{layout!r}>"

    signature = {
        "q_desc": descriptor(config.rows, config.padded_qk, config.packed),
        "k_desc": descriptor(config.block_n, config.padded_qk),
        "v_desc": descriptor(config.block_n, config.padded_v),
        "o_desc": descriptor(config.rows, config.store_cols, config.packed),
        "counter_ptr": "*i32",
        "shape": int32_fields(PrefillShape),
    }
    return attention_source(prefill_kernel, config, Features(mask, score, has_sinks, has_lse), signature)
