"""What Triton compiles for latent attention on Blackwell."""

from triton.experimental.gluon import GluonASTSource

from warpattn.language.nodes import Program

from ...pieces.signature import modifier_functions, packed_span, tensor_signature
from ..layouts import box_layout, element_type
from ..prefill_2q.signature import ALIGNED, PLACES
from ..traits import LEAST_ROWS, Traits
from .config import LatentConfig
from .kernel import latent_kernel


def latent_source(config: LatentConfig, traits: Traits, mask: Program, score: Program | None) -> GluonASTSource:
    """The kernel with the types of its parameters and its constants."""
    copied, paged = config.box_rows < LEAST_ROWS, traits.kind == "paged"

    def keys(columns: int) -> str:
        box = [*([1] if paged else []), 1, config.box_rows, 1, columns]
        layout = box_layout(box, element_type(config.dtype))
        return f"*{config.dtype}" if copied else f"tensordesc<{config.dtype}{box},{layout!r}>"

    out = "fp32" if config.splitk_partitions > 1 else config.dtype
    signature = {
        "q": (f"*{config.dtype}", "i64", "i64", "i64"),
        "k_desc": keys(config.rope),
        "v_desc": keys(config.half),
        "out": (f"*{out}", "i64", "i64", "i64"),
        "lse": ("*fp32", "i64", "i64", "i64"),
        "sinks_ptr": "*fp32",
        "scale": "fp32",
        "shape": ("i32",) * 2,
        "places": PLACES["copied" if copied else traits.kind],
        "mask_args": tensor_signature(mask, "sm100"),
        "score_args": tensor_signature(score, "sm100"),
        "config": "constexpr",
        "functions": "constexpr",
        "traits": "constexpr",
    }
    constants = {"config": config, "functions": modifier_functions(packed_span(mask), score), "traits": traits}
    hints = {(0, 0): ALIGNED, (3, 0): ALIGNED} | ({(1,): ALIGNED, (2,): ALIGNED} if copied else {})
    return GluonASTSource(latent_kernel, signature, constants, hints)
