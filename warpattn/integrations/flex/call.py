"""`flex_attention` outside of a compiled graph."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, BlockMask

from warpattn.api import attention
from warpattn.errors import AttentionError, many
from warpattn.integrations.flex.blocks import LARGEST_BLOCK
from warpattn.integrations.flex.modifiers import mask_of, score_of_call
from warpattn.integrations.signature import Given


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
        score=None if given.score_mod is None else score_of_call(given.score_mod),
        scale=given.scale,
        return_lse=True,
    )
    out = out.transpose(1, 2)
    if aux is not None:
        return out, AuxOutput(lse=lse if aux.lse else None)
    return (out, lse) if given.return_lse else out


def _check(given: Given) -> None:
    """Check what `attention` does not have: layouts, enable_gqa, the sizes of a BlockMask, auxiliary outputs."""
    tensors = {"query": given.query, "key": given.key, "value": given.value}
    for name, x in tensors.items():
        if not isinstance(x, Tensor) or x.ndim != 4 or x.is_nested:
            plain = isinstance(x, Tensor) and not x.is_nested
            got = f"a tensor of shape {tuple(x.shape)}" if plain else f"a {type(x).__name__}"
            raise AttentionError(f"{name} is {got}; it must be a tensor (batch, heads, seq, head_dim)")
    q, k = given.query, given.key
    if q.shape[1] != k.shape[1] and not given.enable_gqa:
        raise AttentionError(f"query has {many(q.shape[1], 'head')} and key {k.shape[1]}; that needs enable_gqa=True")
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
