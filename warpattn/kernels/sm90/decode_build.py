"""What Triton compiles for one decode config, mask and score on Hopper."""

from triton.experimental.gluon import GluonASTSource

from warpattn.nodes import Node, Program, postorder

from ..pieces.signature import modifier_functions, tensor_signature
from .decode import decode_kernel
from .decode_config import DecodeConfig
from .layouts import element_type, tile_layout

_ALL_KEYS: tuple[Node, ...] = (*[("const", "int", 0)] * 3, ("sym", "int", "len_k"))
_ALIGNED = [["tt.divisibility", 16]]


def packed_span(mask: Program) -> Program:
    """The mask's program for a tile that holds several heads: one span for all, so every key if it asks for the head.

    `keep` still decides about each key.
    """
    keep, *span = mask.outputs
    by_head = any(node[:1] + node[2:] == ("sym", "h") for node in postorder(tuple(span)))
    return Program((keep, *_ALL_KEYS), mask.tensors) if by_head else mask


def decode_source(config: DecodeConfig, mask: Program, score: Program | None, has_sinks: bool, has_lse: bool):
    """The kernel with the types of its parameters and its constants."""
    dtype = config.dtype

    def descriptor(cols: int) -> str:
        layout = tile_layout(config.box, cols, element_type(dtype))
        return f"tensordesc<{dtype}[1, {config.box}, 1, {cols}],{layout!r}>"

    matrix = (f"*{dtype}", "i64", "i64", "i64")
    signature = {
        "k": matrix if config.gathers else (descriptor(config.padded_qk),),
        "v": matrix if config.gathers else (descriptor(config.padded_v),),
        "q": matrix,
        "out": matrix,
        "keys": ("*i32", "*i32", "i64"),
        "workspace": ("*fp32", "*fp32", "i32", "*i32"),
        "lse_ptr": "*fp32",
        "sinks_ptr": "*fp32",
        "scale": "fp32",
        "shape": ("i32",) * 8,
        "mask_args": tensor_signature(mask, "sm90"),
        "score_args": tensor_signature(score, "sm90"),
        "config": "constexpr",
        "functions": "constexpr",
        "has_sinks": "constexpr",
        "has_lse": "constexpr",
    }
    constants = {
        "config": config,
        "functions": modifier_functions(packed_span(mask), score),
        "has_sinks": has_sinks,
        "has_lse": has_lse,
    }
    pointers = ("q", "out", "workspace", *(("k", "v") if config.gathers else ()))
    aligned = {(list(signature).index(name), 0): _ALIGNED for name in pointers}
    return GluonASTSource(decode_kernel, signature, constants, aligned)
