"""What Triton compiles for gfx942 and gfx950: the kernel with the types of its parameters and its constants."""

from typing import Any

from triton.experimental.gluon import GluonASTSource

from warpattn.language.nodes import Program

from ..pieces.codegen import MASK_SYMBOLS, compile_function
from ..pieces.signature import modifier_functions, tensor_signature
from .arithmetic import CDNA
from .attend import attention_kernel
from .config import CDNAConfig, Traits
from .epilogue import combine_kernel
from .mask_conditions import TILE_SYMBOLS, conditions

_HINTS = [["tt.divisibility", 16], ["tt.pointer_range", 32]]
STRIDES = 14
SHAPE = 7
_INDICES = {"dense": 0, "ragged": 2, "paged": 2}


def attention_source(config: CDNAConfig, traits: Traits, mask: Program, score: Program | None) -> Any:
    """The attention kernel for one config, mask and score; needs no GPU."""
    out = "*fp32" if traits.partial else f"*{config.dtype}"
    signature = {
        **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), f"*{config.dtype}"),
        "indices": ("*i32",) * _INDICES[traits.sequence],
        "scale": "fp32",
        "strides": ("i32",) * STRIDES,
        "shape": ("i32",) * SHAPE,
        "mask_args": tensor_signature(mask, config.arch),
        "score_args": tensor_signature(score, config.arch),
        "sinks_ptr": "*fp32",
        "o_ptr": out,
        "lse_ptr": "*fp32",
        **dict.fromkeys(("config", "functions", "traits"), "constexpr"),
    }
    keep, span, score_function = modifier_functions(mask, score, CDNA)
    keeps = () if keep is None else keep_functions(mask)
    constants = {"config": config, "functions": (keeps, span, score_function), "traits": traits}
    # 16-byte vectors need pointers that are known to be aligned; strides come in units of 8 elements, which says it.
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
    """The kernel that adds the parts which `attention_source` wrote with these arguments."""
    signature = {
        **dict.fromkeys(("o_parts", "lse_parts"), "*fp32"),
        "o_ptr": f"*{config.dtype}",
        "lse_ptr": "*fp32",
        "sinks_ptr": "*fp32",
        "indices": ("*i32",) * _INDICES[traits.sequence],
        "strides": ("i32",) * STRIDES,
        "shape": ("i32",) * SHAPE,
        **dict.fromkeys(("config", "traits"), "constexpr"),
    }
    return GluonASTSource(
        combine_kernel, signature, {"config": config, "traits": traits}, {(i,): _HINTS for i in (0, 2)}
    )
