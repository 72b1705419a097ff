"""What Triton compiles for one config, mask and score of dense prefill on Hopper."""

from triton.experimental.gluon import GluonASTSource

from warpattn.language.nodes import Program

from ...pieces.signature import modifier_functions, tensor_signature
from ..arguments import int32_fields
from ..layouts import element_type, tile_layout
from .config import PrefillShape, SM90Config
from .kernel import prefill_kernel


def prefill_source(config: SM90Config, mask: Program, score: Program | None, has_sinks: bool, has_lse: bool):
    """The kernel with the types of its parameters and its constants."""

    def descriptor(rows: int, cols: int) -> str:
        layout = tile_layout(rows, cols, element_type(config.element))
        return f"tensordesc<{config.element.name}[1, {rows}, 1, {cols}],{layout!r}>"

    signature = {
        "q_desc": descriptor(config.rows, config.padded_qk),
        "k_desc": descriptor(config.block_n, config.padded_qk),
        "v_desc": descriptor(config.block_n, config.padded_v),
        "o_desc": descriptor(config.rows, config.store_cols),
        "lse_ptr": "*fp32",
        "sinks_ptr": "*fp32",
        "counter_ptr": "*i32",
        "scale": "fp32",
        "shape": int32_fields(PrefillShape),
        "mask_args": tensor_signature(mask, "sm90"),
        "score_args": tensor_signature(score, "sm90"),
        "config": "constexpr",
        "functions": "constexpr",
        "has_sinks": "constexpr",
        "has_lse": "constexpr",
    }
    constants = {
        "config": config,
        "functions": modifier_functions(mask, score),
        "has_sinks": has_sinks,
        "has_lse": has_lse,
    }
    return GluonASTSource(prefill_kernel, signature, constants)
