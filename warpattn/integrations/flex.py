"""FlexAttention's interface: `flex_attention` with its own argument order, and its functions as masks and scores.

    from warpattn.integrations.flex import flex_attention
    out = flex_attention(q, k, v, score_mod=alibi, block_mask=create_block_mask(causal, None, None, S, S))

`score_mod` and `mask_mod` are run once with symbols and translated (see `flex_symbols`), a `BlockMask` also gives its
blocks (see `flex_blocks`). FlexAttention's q_idx is the row of the query, counted from 0; the masks of this package
count a query in key positions, so that the last one sits at the last key.

Every call translates anew, since a function may read variables that change. `mask_of` and `score_of` translate once:

    window = mask_of(create_block_mask(sliding_window, None, None, S, S))
    out = warpattn.attention(q, k, v, mask=window)                              # (batch, seq, heads, head_dim)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, BlockMask

from warpattn.api import attention
from warpattn.check import AttentionError
from warpattn.expr import Expr, to_float, user_result_error
from warpattn.integrations.flex_blocks import LARGEST_BLOCK, BlockSparse
from warpattn.integrations.flex_symbols import run
from warpattn.integrations.signature import Given, drop_in
from warpattn.masks import Mask
from warpattn.scores import Score
from warpattn.traced import Lengths

__all__ = ["MaskMod", "ScoreMod", "flex_attention", "mask_of", "score_of"]

Value = Any  # a symbol, a number or a tensor


@dataclass(frozen=True, eq=False)
class MaskMod(Mask):
    """mask_mod(b, h, q_idx, kv_idx) of FlexAttention as a mask; `extra` are further arguments that it takes."""

    fn: Callable[..., Any]
    extra: Callable[[Lengths], tuple[Any, ...]] | None = None

    def keep(self, b: Value, h: Value, q: Value, k: Value, lens: Lengths | None = None) -> Value:
        result = _run(self, (b, h), q, k, lens)
        boolean = result.dtype in ("bool", torch.bool) if isinstance(result, Expr | Tensor) else result
        if not isinstance(boolean, bool) or (isinstance(result, Expr | Tensor) and not boolean):
            raise user_result_error(self.fn, result, "a mask_mod must return a bool, such as a comparison")
        return result

    def program(self) -> Any:
        return _own_program(self)


@dataclass(frozen=True, eq=False)
class ScoreMod(Score):
    """score_mod(score, b, h, q_idx, kv_idx) of FlexAttention as a score; `extra` are further arguments it takes."""

    fn: Callable[..., Any]
    extra: Callable[[Lengths], tuple[Any, ...]] | None = None

    def apply(self, s: Value, b: Value, h: Value, q: Value, k: Value, lens: Lengths | None = None) -> Value:
        result = _run(self, (s, b, h), q, k, lens)
        number = isinstance(result, int | float) and not isinstance(result, bool)
        if not (number or (isinstance(result, Expr | Tensor) and result.dtype not in ("bool", torch.bool))):
            raise user_result_error(self.fn, result, "a score_mod must return a number, such as the score it got")
        return to_float(result)

    def program(self) -> Any:
        return _own_program(self)


def mask_of(mask: BlockMask | Mask | Callable[..., Any]) -> Mask:
    """The mask of a BlockMask or a mask_mod; a Mask stays as it is.

    A BlockMask means what FlexAttention's kernels make of it: its full blocks are visible whatever mask_mod says, and
    blocks that it does not list are hidden. Its block lists are read now, on their device.
    """
    if isinstance(mask, Mask):
        return mask
    if not isinstance(mask, BlockMask):
        if not callable(mask):
            raise AttentionError(f"block_mask is a {type(mask).__name__}; it must be a BlockMask or a mask_mod")
        return MaskMod(mask)
    inner = MaskMod(mask.mask_mod)
    if min(mask.BLOCK_SIZE) >= LARGEST_BLOCK:  # FlexAttention's own "no blocks": one that covers everything
        return inner
    return BlockSparse.read(inner, mask)


def score_of(score: Score | Callable[..., Any]) -> Score:
    """The score of a score_mod; a Score stays as it is."""
    if isinstance(score, Score):
        return score
    if not callable(score):
        raise AttentionError(f"score_mod is a {type(score).__name__}; it must be a function")
    return ScoreMod(score)


@drop_in(
    "query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False, "
    "kernel_options=None, *, return_aux=None",
    refused={"kernel_options": "they are options of FlexAttention's own kernels; leave them out"},
)
def flex_attention(given: Given) -> Any:
    """torch.nn.attention.flex_attention.flex_attention, with its arguments.

    query (B, Hq, Sq, D), key (B, Hkv, Sk, D), value (B, Hkv, Sk, Dv), the batch of key and value may be 1. `block_mask`
    may also be a mask_mod or a warpattn Mask, `score_mod` a warpattn Score. Returns out (B, Hq, Sq, Dv); with
    return_lse also lse (B, Hq, Sq), natural log; with return_aux also an AuxOutput. A row that sees no key gives 0 and
    an LSE of -inf. Raises AttentionError.
    """
    if torch.compiler.is_compiling():
        from warpattn.integrations import flex_uncompiled  # imports torch._dynamo

        return flex_uncompiled.attend(given)
    return attend(given)


def attend(given: Given) -> Any:
    """`flex_attention` outside of a compiled graph."""
    _check(given)
    q, k, v = given.query, given.key, given.value
    if len(k) == 1 and len(q) > 1:
        k, v = (x.expand(len(q), -1, -1, -1) for x in (k, v))
    aux = given.return_aux
    out, lse = attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        mask=None if given.block_mask is None else mask_of(given.block_mask),
        score=None if given.score_mod is None else score_of(given.score_mod),
        scale=given.scale,
        return_lse=True,
    )
    out = out.transpose(1, 2)
    if aux is not None:
        return out, AuxOutput(lse=lse if aux.lse else None)
    return (out, lse) if given.return_lse else out


def _check(given: Given) -> None:
    """What `attention` does not know of: layouts, enable_gqa, the sizes of a BlockMask, auxiliary outputs."""
    tensors = {"query": given.query, "key": given.key, "value": given.value}
    for name, x in tensors.items():
        if not isinstance(x, Tensor) or x.ndim != 4 or x.is_nested:
            plain = isinstance(x, Tensor) and not x.is_nested
            got = f"a tensor of shape {tuple(x.shape)}" if plain else f"a {type(x).__name__}"
            raise AttentionError(f"{name} is {got}; it must be a tensor (batch, heads, seq, head_dim)")
    q, k = given.query, given.key
    if q.shape[1] != k.shape[1] and not given.enable_gqa:
        raise AttentionError(f"query has {q.shape[1]} heads and key {k.shape[1]}; that needs enable_gqa=True")
    if given.return_aux is not None and given.return_aux.max_scores:
        raise AttentionError("return_aux.max_scores is True; only the LSE is available: AuxRequest(lse=True)")
    if given.return_aux is not None and given.return_lse:
        raise AttentionError("return_lse is True and return_aux is given; use return_aux=AuxRequest(lse=True) alone")
    mask = given.block_mask
    if not isinstance(mask, BlockMask) or min(mask.BLOCK_SIZE) >= LARGEST_BLOCK:
        return
    made, wanted = mask.shape, (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if len(made) != 4 or made[2:] != wanted[2:] or any(a not in (1, b) for a, b in zip(made[:2], wanted, strict=False)):
        raise AttentionError(
            f"block_mask has shape {tuple(made)}; it must be {wanted}, where batch and heads may also be 1"
        )


def _run(mod: MaskMod | ScoreMod, head: tuple[Value, ...], q: Value, k: Value, lens: Lengths | None) -> Value:
    """The function at row q - (len_k - len_q); with symbols translated, with tensors as it is."""
    lens = Lengths(k.shape[-1], k.shape[-1]) if lens is None and isinstance(k, Tensor) else lens
    row = q if lens is None else q - (lens.k - lens.q)
    args = (*head, row, k, *(mod.extra(lens) if mod.extra is not None and lens is not None else ()))
    if isinstance(k, Expr):
        return run(mod.fn, *args)
    return mod.fn(*(torch.as_tensor(x) if isinstance(x, int | float) else x for x in args))


def _own_program(mod: Any) -> Any:
    """The program, kept by the object alone: what a function reads may differ where the function is the same."""
    if "_program" not in mod.__dict__:
        mod.__dict__["_program"] = mod.record()
    return mod.__dict__["_program"]
