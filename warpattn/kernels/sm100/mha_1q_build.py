"""Describes the 1Q kernel for one config, mask and score to Triton; needs no GPU."""

from triton.experimental.gluon import GluonASTSource

from warpattn.nodes import Program

from ..pieces.signature import modifier_functions, tensor_signature
from .config import FA4Config
from .layouts import box_layout, element_type, query_box
from .mha_1q import mha_1q_kernel
from .mha_1q_softmax import out_columns, out_type


def source_1q(config: FA4Config, mask: Program, score: Program | None, group: int, has_sinks: bool, has_lse: bool):
    """What Triton compiles: the kernel with the types of its parameters and its constants."""
    out = "fp32" if config.splitk_partitions > 1 else config.dtype

    def descriptor(box: list[int], name: str = config.dtype, dtype=element_type(config.dtype)) -> str:
        return f"tensordesc<{name}{box},{box_layout(box, dtype)!r}>"

    signature = {
        "q_desc": descriptor(query_box(config, config.BK0)),
        "k_desc": descriptor([1, config.BN, 1, config.BK0]),
        "v_desc": descriptor([1, config.BN, 1, config.padded_ov_depth]),
        "o_desc": descriptor(query_box(config, out_columns(config)), out, out_type(config)),
        "lse_ptr": "*fp32",
        "sinks_ptr": "*fp32",
        "scale": "fp32",
        "shape": ("i32",) * 4,
        "mask_args": tensor_signature(mask, "sm100"),
        "score_args": tensor_signature(score, "sm100"),
        "config": "constexpr",
        "functions": "constexpr",
        "has_sinks": "constexpr",
        "has_lse": "constexpr",
        "group": "constexpr",
    }
    constants = {
        "config": config,
        "functions": modifier_functions(mask, score),
        "has_sinks": has_sinks,
        "has_lse": has_lse,
        "group": group,
    }
    return GluonASTSource(mha_1q_kernel, signature, constants)
