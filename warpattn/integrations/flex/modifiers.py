"""Turns a mask_mod, a BlockMask or a score_mod of FlexAttention into a mask or score."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from warpattn.errors import AttentionError
from warpattn.inputs import of_type
from warpattn.integrations.flex.blocks import LARGEST_BLOCK, BlockSparse
from warpattn.integrations.flex.symbols import run
from warpattn.language.expr import Expr, to_float, user_result_error
from warpattn.language.traced import Lengths
from warpattn.masks import Mask
from warpattn.scores import Score

Value = Any  # a symbol, a number or a tensor


@dataclass(frozen=True, eq=False)
class MaskMod(Mask):
    """mask_mod(b, h, q_idx, kv_idx) of FlexAttention as a mask; `extra` are further arguments that it takes."""

    ALONE = True  # one function may read other values later
    fn: Callable[..., Any]
    extra: Callable[[Lengths], tuple[Any, ...]] | None = None

    def keep(self, b: Value, h: Value, q: Value, k: Value, lens: Lengths | None = None) -> Value:
        result = _run(self, (b, h), q, k, lens)
        boolean = result.dtype in ("bool", torch.bool) if isinstance(result, Expr | Tensor) else result
        if not isinstance(boolean, bool) or (isinstance(result, Expr | Tensor) and not boolean):
            raise user_result_error(self.fn, result, "a mask_mod must return a bool, such as a comparison")
        return result


@dataclass(frozen=True, eq=False)
class ScoreMod(Score):
    """score_mod(score, b, h, q_idx, kv_idx) of FlexAttention as a score; `extra` are further arguments it takes.
    `kept`: several calls use it, see `symbols.run`."""

    ALONE = True
    fn: Callable[..., Any]
    extra: Callable[[Lengths], tuple[Any, ...]] | None = None
    kept: bool = False

    def apply(self, s: Value, b: Value, h: Value, q: Value, k: Value, lens: Lengths | None = None) -> Value:
        result = _run(self, (s, b, h), q, k, lens)
        number = isinstance(result, int | float) and not isinstance(result, bool)
        if not (number or (isinstance(result, Expr | Tensor) and result.dtype not in ("bool", torch.bool))):
            raise user_result_error(self.fn, result, "a score_mod must return a number, such as the score it got")
        return to_float(result)


def mask_of(mask: BlockMask | Mask | Callable[..., Any]) -> Mask:
    """Return the mask of a BlockMask or a mask_mod; a Mask is returned unchanged.

    As in FlexAttention's kernels, full blocks of a BlockMask are visible whatever mask_mod says, and blocks that it
    does not list are hidden. Its block lists are read now, on their device.
    """
    if isinstance(mask, Mask):
        return mask
    if not isinstance(mask, BlockMask):
        if not callable(mask):
            raise AttentionError(f"block_mask is {of_type(mask)}; it must be a BlockMask or a mask_mod")
        return MaskMod(mask)
    inner = MaskMod(mask.mask_mod)
    if min(mask.BLOCK_SIZE) >= LARGEST_BLOCK:  # FlexAttention's own "no blocks": one that covers everything
        return inner
    return BlockSparse.read(inner, mask)


def score_of(score: Score | Callable[..., Any]) -> Score:
    """Return the score of a score_mod; a Score is returned unchanged.

    What the function computes of tensors alone is computed once. Only where gradients reach it, it is part of the score
    (AttentionError if it has no translation); tensors that the function reads are read in every call.
    """
    return _score(score, kept=True)


def score_of_call(score: Score | Callable[..., Any]) -> Score:
    """`score_of` for one call, so that torch may differentiate what the function computes of tensors alone."""
    return _score(score, kept=False)


def _score(score: Score | Callable[..., Any], kept: bool) -> Score:
    if isinstance(score, Score):
        return score
    if not callable(score):
        raise AttentionError(f"score_mod is {of_type(score)}; it must be a function")
    return ScoreMod(score, kept=kept)


def _run(mod: MaskMod | ScoreMod, head: tuple[Value, ...], q: Value, k: Value, lens: Lengths | None) -> Value:
    """Call the function with row q - (len_k - len_q); symbols are translated, tensors are passed as such."""
    lens = Lengths(k.shape[-1], k.shape[-1]) if lens is None and isinstance(k, Tensor) else lens
    row = q if lens is None else q - (lens.k - lens.q)
    args = (*head, row, k, *(mod.extra(lens) if mod.extra is not None and lens is not None else ()))
    if isinstance(k, Expr):
        return run(mod.fn, *args, kept=isinstance(mod, ScoreMod) and mod.kept)
    return mod.fn(*(torch.as_tensor(x) if isinstance(x, int | float) else x for x in args))
