"""What Triton compiles for gfx942 and gfx950: the kernels with the types of their parameters and their constants."""

from typing import Any

from triton.experimental.gluon import GluonASTSource

from warpattn.language.nodes import Program
from warpattn.problem.scales import scale_types

from ..pieces.codegen import MASK_SYMBOLS, compile_function
from ..pieces.signature import modifier_functions, tensor_signature
from .arithmetic import CDNA
from .config import (
    CDNAConfig,
    LseStrides,
    PagedIndices,
    PagedRaggedIndices,
    RaggedIndices,
    RowStrides,
    Shape,
    Strides,
    Traits,
)
from .kernel import attention_kernel, combine_kernel
from .mask_conditions import TILE_SYMBOLS, conditions

_HINTS = [["tt.divisibility", 16], ["tt.pointer_range", 32]]
_ROW_STRIDES = RowStrides("i32", "i32", "i32")
_STRIDES = Strides(*[_ROW_STRIDES] * 4, LseStrides("i32", "i32"))
_SHAPE = Shape(*["i32"] * len(Shape._fields))
_INDICES = {
    "dense": (),
    "ragged": RaggedIndices("*i32", "*i32"),
    "paged": PagedIndices("*i32", "*i32"),
    "paged-ragged": PagedRaggedIndices("i32", "*i32", "*i32", "*i32"),
}


def attention_source(config: CDNAConfig, traits: Traits, mask: Program, score: Program | None) -> Any:
    """The attention kernel for one config, mask and score; needs no GPU."""
    out = "*fp32" if traits.partial else config.element.pointer
    signature = {
        "q_ptr": config.element.pointer,
        **dict.fromkeys(("k_ptr", "v_ptr"), config.stored.pointer),
        "indices": _INDICES[traits.sequence],
        "scale": scale_types(config.eight_bit),
        "strides": _STRIDES,
        "shape": _SHAPE,
        "mask_args": tensor_signature(mask, config.arch),
        "score_args": tensor_signature(score, config.arch),
        "sinks_ptr": "*fp32",
        "o_ptr": out,
        "lse_ptr": "*fp32",
        **dict.fromkeys(("config", "functions", "traits"), "constexpr"),
    }
    functions = modifier_functions(mask, score, CDNA)
    functions = functions._replace(keep=() if functions.keep is None else keep_functions(mask))
    constants = {"config": config, "functions": functions, "traits": traits}
    # 16-byte vectors need pointers that are known to be aligned; strides in runs of 8 elements keep the alignment.
    pointers = ("q_ptr", "k_ptr", "v_ptr", "o_ptr")
    names = list(signature)
    return GluonASTSource(attention_kernel, signature, constants, {(names.index(p),): _HINTS for p in pointers})


def keep_functions(mask: Program) -> tuple[Any, ...]:
    """(condition of an element, whether a tile meets it or None) for each condition of the mask; see `conditions`."""
    ranks = tuple(tensor.ndim for tensor in mask.tensors)
    found = conditions(mask.outputs[0])
    return tuple(
        (
            compile_function((keep,), MASK_SYMBOLS, ranks, CDNA),
            None if always is None else compile_function((always,), TILE_SYMBOLS, ranks, CDNA),
        )
        for keep, always in found
    )


def combine_source(config: CDNAConfig, traits: Traits) -> Any:
    """The kernel that combines the parts of `attention_source` with these arguments."""
    signature = {
        **dict.fromkeys(("o_parts", "lse_parts"), "*fp32"),
        "o_ptr": config.element.pointer,
        "lse_ptr": "*fp32",
        "sinks_ptr": "*fp32",
        "indices": _INDICES[traits.sequence],
        "strides": _STRIDES,
        "shape": _SHAPE,
        **dict.fromkeys(("config", "traits"), "constexpr"),
    }
    return GluonASTSource(
        combine_kernel, signature, {"config": config, "traits": traits}, {(i,): _HINTS for i in (0, 2)}
    )
