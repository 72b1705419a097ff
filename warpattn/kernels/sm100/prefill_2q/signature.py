"""Describes the Blackwell prefill kernel for one config, mask and score to Triton; needs no GPU."""

import triton
from triton.experimental.gluon import GluonASTSource

from warpattn.language.nodes import Program
from warpattn.problem.arch import compile_options, triton_target

from ...pieces.signature import modifier_functions, tensor_signature
from ..config import FA4Config
from ..layouts import box_layout, element_type, query_box
from ..traits import LEAST_ROWS, STORE_COLUMNS, Traits
from .kernel import mha_2q_kernel

TARGET = triton_target("sm100")
# Types of `places`, see mha_2q.find_sources.
PLACES = {
    "dense": (),
    "ragged": ("*i32", "*i32", *["i32"] * 8),
    "paged": ("*i32", "*i32", "i64", "i32", *["i32"] * 4),
    "copied": ("*i32", "*i32", "i64", "i32", *["i64", "i64", "i64", "i32"] * 2),
}
ALIGNED = [["tt.divisibility", 16]]
OPTIONS = compile_options()


def compile_prefill(config: FA4Config, traits: Traits, mask: Program, score: Program | None):
    """The compiled kernel (a Triton CompiledKernel) for sm_100."""
    return triton.compile(prefill_source(config, traits, mask, score), target=TARGET, options=OPTIONS)


def prefill_source(config: FA4Config, traits: Traits, mask: Program, score: Program | None, kernel=mha_2q_kernel):
    """What Triton compiles: a prefill kernel with the types of its parameters and its constants."""
    out, columns = ("fp32", 32) if config.splitk_partitions > 1 else (config.dtype, STORE_COLUMNS)
    ragged, paged = traits.kind == "ragged", traits.kind == "paged"

    copied = config.box_rows < LEAST_ROWS

    def descriptor(box: list[int], clipped: bool, dtype: str = config.dtype) -> str:
        box = [1, *box] if clipped else box
        return f"tensordesc<{dtype}{box},{box_layout(box, element_type(dtype))!r}>"

    def keys(columns: int) -> str:
        return f"*{config.dtype}" if copied else descriptor([1, config.box_rows, 1, columns], ragged or paged)

    signature = {
        "q_desc": descriptor(query_box(config, config.BK0), ragged),
        "k_desc": keys(config.BK0),
        "v_desc": keys(config.padded_ov_depth),
        "o_desc": descriptor(query_box(config, columns), ragged, out),
        "lse_ptr": "*fp32",
        "sinks_ptr": "*fp32",
        "scale": "fp32",
        "shape": ("i32",) * 4,
        "places": PLACES["copied" if copied else traits.kind],
        "mask_args": tensor_signature(mask, "sm100"),
        "score_args": tensor_signature(score, "sm100"),
        "config": "constexpr",
        "functions": "constexpr",
        "traits": "constexpr",
    }
    constants = {"config": config, "functions": modifier_functions(mask, score), "traits": traits}
    return GluonASTSource(kernel, signature, constants, {(1,): ALIGNED, (2,): ALIGNED} if copied else {})
