"""`flex_attention` outside of a compiled graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from warpattn.api import attention
from warpattn.errors import Rules, many
from warpattn.inputs import kind_of, of_type
from warpattn.integrations.flex.blocks import LARGEST_BLOCK
from warpattn.integrations.flex.maxima import max_scores
from warpattn.integrations.flex.modifiers import mask_of, score_of_call
from warpattn.integrations.signature import Given
from warpattn.masks import Mask
from warpattn.quantized import result_dtype
from warpattn.scores import Score
from warpattn.torch_modes import autocast

HEADS_LAST = (0, 2, 1, 3)  # order of the dimensions [B, H, S, D] in memory in which `attention` makes its output


def attend(given: Given) -> Any:
    """`flex_attention` outside of a compiled graph."""
    _check(given)
    q, k, v = (autocast(x) for x in (given.query, given.key, given.value))
    if len(k) == 1 and len(q) > 1:
        k, v = (x.expand(len(q), -1, -1, -1) for x in (k, v))
    aux = given.return_aux
    with_lse = bool(given.return_lse if aux is None else aux.lse)  # a forward without an LSE is faster
    mask = None if given.block_mask is None else mask_of(given.block_mask)
    score = None if given.score_mod is None else score_of_call(given.score_mod)
    order = (*sorted(range(3), key=q.stride, reverse=True), 3)  # of the dimensions in memory; the output has the same
    result = attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        mask=mask,
        score=score,
        scale=given.scale,
        return_lse=with_lse,
        out=None if order == HEADS_LAST or _needs_fresh_output((q, k, v), mask, score) else _output(q, v, order),
    )
    out, lse = result if isinstance(result, tuple) else (result, None)
    out = out.transpose(1, 2).permute(order).contiguous().permute([order.index(i) for i in range(4)])
    if aux is not None:
        return out, AuxOutput(lse, max_scores(q, k, mask, score, given.scale) if aux.max_scores else None)
    return (out, lse) if with_lse else out


def _needs_fresh_output(tensors: tuple[Tensor, ...], mask: Mask | None, score: Score | None) -> bool:
    """Whether `attention` takes no `out`: with gradients, and for tensors that are more than memory."""
    if type(tensors[0]) not in (Tensor, torch.nn.Parameter) or peek_interpreter_stack() is not None:
        return True
    added = None if mask is None or not torch.is_grad_enabled() else mask.additive()
    captured = [x for part in (score, added) if isinstance(part, Score) for x in part.program().tensors]
    return torch.is_grad_enabled() and any(x.requires_grad for x in (*tensors, *captured))


def _output(q: Tensor, v: Tensor, order: tuple[int, ...]) -> Tensor:
    """Make an output [B, S, H, Dv] in memory for [B, H, S, Dv] in the order of dimensions `order`."""
    shape = (*q.shape[:3], v.shape[-1])
    return torch.empty_permuted(shape, order, dtype=result_dtype(q.dtype), device=q.device).transpose(1, 2)


def _check(given: Given) -> None:
    """Check what `attention` does not have: layouts, enable_gqa, the sizes of a BlockMask, auxiliary outputs."""
    rules = Rules()
    ranked = [_is_ranked(rules, name, getattr(given, name)) for name in ("query", "key", "value")]
    if all(ranked):
        _check_sizes(rules, given)
    options, aux = given.kernel_options, given.return_aux
    fine = isinstance(options, Mapping | None)
    rules.require(fine, f"kernel_options is {kind_of(options)}", "it must be None or a dictionary")
    if not isinstance(aux, AuxRequest | None):
        rules.add(f"return_aux is {kind_of(aux)}", "it must be None or an AuxRequest")
    elif aux is not None:
        both = "return_lse is True and return_aux is given"
        rules.require(not given.return_lse, both, "use return_aux=AuxRequest(lse=True) alone")
    rules.done()


def _is_ranked(rules: Rules, name: str, x: Any) -> bool:
    """Require a tensor of rank 4."""
    plain = isinstance(x, Tensor) and not x.is_nested
    got = f"a tensor of shape {tuple(x.shape)}" if plain else of_type(x)
    return rules.require(plain and x.ndim == 4, f"{name} is {got}", "it must be a tensor (batch, heads, seq, head_dim)")


def _check_sizes(rules: Rules, given: Given) -> None:
    """Check heads, and that a BlockMask was made for these sizes."""
    q, k, mask = given.query, given.key, given.block_mask
    heads = f"query has {many(q.shape[1], 'head')} and key {k.shape[1]}"
    rules.require(q.shape[1] == k.shape[1] or bool(given.enable_gqa), heads, "that needs enable_gqa=True")
    if not isinstance(mask, BlockMask) or min(mask.BLOCK_SIZE) >= LARGEST_BLOCK:
        return
    made, wanted = mask.shape, (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    outer = zip(made[:2], wanted, strict=False)
    fits = len(made) == 4 and made[2:] == wanted[2:] and all(size in (1, whole) for size, whole in outer)
    rule = f"it must be {wanted}, where batch and heads may also be 1"
    rules.require(fits, f"block_mask has shape {tuple(made)}", rule)
