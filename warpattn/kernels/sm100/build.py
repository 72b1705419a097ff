"""Describes the Blackwell prefill kernel for one config, mask and score to Triton; needs no GPU."""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import GluonASTSource

from warpattn.nodes import Program

from ..pieces.signature import modifier_functions, tensor_signature
from .config import FA4Config
from .layouts import STORE_COLUMNS, box_layout, element_type, query_box
from .mha_2q import mha_2q_kernel

TARGET = GPUTarget("cuda", 100, 32)
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


def compile_prefill(config: FA4Config, mask: Program, score: Program | None, **constants: Any):
    """The compiled kernel (a Triton CompiledKernel) for sm_100."""
    return triton.compile(prefill_source(config, mask, score, **constants), target=TARGET, options=OPTIONS)


def prefill_source(config: FA4Config, mask: Program, score: Program | None, group: int, has_sinks: bool, has_lse: bool):
    """What Triton compiles: the kernel with the types of its parameters and its constants."""

    def descriptor(box: list[int]) -> str:
        return f"tensordesc<{config.dtype}{box},{box_layout(box, element_type(config.dtype))!r}>"

    signature = {
        "q_desc": descriptor(query_box(config, config.padded_qk_depth)),
        "k_desc": descriptor([1, config.BN, 1, config.padded_qk_depth]),
        "v_desc": descriptor([1, config.BN, 1, config.padded_ov_depth]),
        "o_desc": descriptor(query_box(config, STORE_COLUMNS.value)),
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
    return GluonASTSource(mha_2q_kernel, signature, constants)
