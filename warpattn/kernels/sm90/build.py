"""Compiles the Hopper prefill kernel for one config, mask and score; the only place that asks Triton for sm_90."""

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import GluonASTSource

from warpattn.check import AttentionError
from warpattn.nodes import Program

from ..pieces.emit import MASK_SYMBOLS, SCORE_SYMBOLS, SPAN_SYMBOLS, compile_function
from .config import SM90Config
from .layouts import element_type, tile_layout
from .prefill import prefill_kernel

TARGET = GPUTarget("cuda", 90, 32)
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
_POINTERS = {
    "torch.bool": "*i8",
    "torch.uint8": "*u8",
    "torch.int8": "*i8",
    "torch.int16": "*i16",
    "torch.int32": "*i32",
    "torch.int64": "*i64",
    "torch.float16": "*fp16",
    "torch.bfloat16": "*bf16",
    "torch.float32": "*fp32",
    "torch.float64": "*fp64",
}


def tensor_signature(program: Program | None) -> tuple[str, ...]:
    """Kernel types of a program's captured tensors: pointer, sizes, strides of each."""
    signature: list[str] = []
    for tensor in program.tensors if program is not None else ():
        pointer = _POINTERS.get(str(tensor.dtype))
        if pointer is None:
            listed = ", ".join(name.removeprefix("torch.") for name in _POINTERS)
            raise AttentionError(f"a captured tensor has dtype {tensor.dtype}; the sm90 backend reads {listed}")
        if tensor.ndim == 0:
            raise AttentionError("a captured tensor has no dimensions; capture the number itself for the sm90 backend")
        signature += [pointer, *["i32"] * tensor.ndim, *["i64"] * tensor.ndim]
    return tuple(signature)


def modifier_functions(keep_and_span: Program, score: Program | None):
    """(keep, span, score) as Gluon functions; keep is None when every key is visible, score None without one."""
    ranks = tuple(tensor.ndim for tensor in keep_and_span.tensors)
    keep_node, *span_nodes = keep_and_span.outputs
    always = keep_node[0] == "const" and keep_node[2] is True
    keep = None if always else compile_function((keep_node,), MASK_SYMBOLS, ranks)
    span = compile_function(tuple(span_nodes), SPAN_SYMBOLS, ranks)
    if score is None:
        return keep, span, None
    score_ranks = tuple(tensor.ndim for tensor in score.tensors)
    return keep, span, compile_function(score.outputs, SCORE_SYMBOLS, score_ranks)


def compile_prefill(config: SM90Config, mask: Program, score: Program | None, has_sinks: bool, has_lse: bool):
    """The compiled kernel (a Triton CompiledKernel) for sm_90; needs no GPU."""
    return triton.compile(prefill_source(config, mask, score, has_sinks, has_lse), target=TARGET, options=OPTIONS)


def prefill_source(config: SM90Config, mask: Program, score: Program | None, has_sinks: bool, has_lse: bool):
    """What Triton compiles: the kernel with the types of its parameters and its constants."""

    def descriptor(rows: int, cols: int) -> str:
        layout = tile_layout(rows, cols, element_type(config.dtype))
        return f"tensordesc<{config.dtype}[1, {rows}, 1, {cols}],{layout!r}>"

    signature = {
        "q_desc": descriptor(config.rows, config.padded_qk),
        "k_desc": descriptor(config.block_n, config.padded_qk),
        "v_desc": descriptor(config.block_n, config.padded_v),
        "o_desc": descriptor(config.rows, config.store_cols),
        "lse_ptr": "*fp32",
        "sinks_ptr": "*fp32",
        "counter_ptr": "*i32",
        "scale": "fp32",
        "shape": ("i32",) * 7,
        "mask_args": tensor_signature(mask),
        "score_args": tensor_signature(score),
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
