"""What Triton compiles for gfx942 and gfx950: the kernels with the types of their arguments and their constants."""

from collections.abc import Mapping
from typing import Any

from triton.experimental.gluon import GluonASTSource

from warpattn.language.nodes import Program

from ..pieces.codegen import MASK_SYMBOLS, compile_function
from ..pieces.signature import ALIGNED, Functions, captured_types, kernel_source, modifier_functions
from .arithmetic import CDNA
from .config import CDNAConfig, Traits
from .kernel import attention_kernel, combine_kernel
from .mask_conditions import TILE_SYMBOLS, conditions

# 16-byte vectors need pointers that are known to be aligned; strides in runs of 8 elements keep the alignment.
HINTS = [*ALIGNED, ["tt.pointer_range", 32]]


def attention_source(
    args: Mapping[str, Any], config: CDNAConfig, traits: Traits, mask: Program, score: Program | None
) -> GluonASTSource:
    """The attention kernel of a launch with `args`; needs no GPU."""
    constants = {"config": config, "functions": cdna_functions(mask, score), "traits": traits}
    queries = ("q_ptr.latent", "q_ptr.rope") if traits.own_rope else ("q_ptr",)
    keys = ("k_ptr.latent", "k_ptr.rope") if config.rope else ("k_ptr",)
    aligned = (*queries, *keys, "v_ptr", "o_ptr")
    again = [f"again.{path.replace('_ptr', '')}" for path in aligned] if args["again"] else []
    hints = dict.fromkeys((*aligned, *again), HINTS)
    return kernel_source(attention_kernel, args, constants, captured_types(mask, score, config.arch), hints)


def cdna_functions(mask: Program, score: Program | None) -> Functions:
    """The functions of a mask and a score; `keep` is a tuple of conditions, see `keep_functions`."""
    functions = modifier_functions(mask, score, CDNA)
    return functions._replace(keep=() if functions.keep is None else keep_functions(mask))


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


def combine_source(args: Mapping[str, Any], config: CDNAConfig, traits: Traits) -> GluonASTSource:
    """The kernel that combines the parts of `attention_source`."""
    hints = dict.fromkeys(("o_parts", "o_ptr"), HINTS)
    return kernel_source(combine_kernel, args, {"config": config, "traits": traits}, hints=hints)
