"""What Triton compiles for pairs of CTAs."""

from triton.experimental.gluon import GluonASTSource

from warpattn.language.nodes import Program

from ...pieces.signature import modifier_functions, tensor_signature
from ..config import FA4Config
from ..layouts import element_type
from ..traits import Traits
from .context import pair_box, pair_layout
from .kernel import mha_pair_kernel


def pair_source(config: FA4Config, traits: Traits, mask: Program, score: Program | None):
    """What Triton compiles, for clusters of two: the kernel with the types of its parameters and its constants."""

    def descriptor(operand: str) -> str:
        layout = pair_layout(config, operand, element_type(config.dtype))
        return f"tensordesc<{config.dtype}{pair_box(config, operand)},{layout!r}>"

    signature = {
        "q_desc": descriptor("q"),
        "k_desc": descriptor("k"),
        "v_desc": descriptor("v"),
        "o_desc": descriptor("q"),
        "lse_ptr": "*fp32",
        "sinks_ptr": "*fp32",
        "scale": "fp32",
        "shape": ("i32",) * 4,
        "mask_args": tensor_signature(mask, "sm100"),
        "score_args": tensor_signature(score, "sm100"),
        "config": "constexpr",
        "functions": "constexpr",
        "traits": "constexpr",
    }
    constants = {"config": config, "functions": modifier_functions(mask, score), "traits": traits}
    return GluonASTSource(mha_pair_kernel, signature, constants)
