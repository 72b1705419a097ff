"""torch's flash-attention operators, replaced by this package; what `torch_sdpa.register` puts in torch's registry.

    F.scaled_dot_product_attention ─▶ aten::_scaled_dot_product_flash_attention           CUDA  (batch, heads, seq, dim)
                                      aten::_scaled_dot_product_flash_attention_for_cpu   CPU
    varlen_attn, nested tensors ────▶ aten::_flash_attention_forward                      both  (batch, seq, heads, dim)
                                      aten::..._no_dropout_inplace                        both  or (total, heads, dim)

On the CPU the backward of scaled_dot_product_attention is served, too, row tile by row tile. Others have none: tensors
that require gradients are refused in the forward operator or, where it cannot see that, in the backward one.

`is_causal` is aligned to the top left in the operators of scaled_dot_product_attention, and to the bottom right in
`_flash_attention_forward`, as in torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from warpattn.api import attention
from warpattn.errors import AttentionError
from warpattn.integrations.flash_attn import packed
from warpattn.integrations.flash_attn.modifiers import Tail, scored, visible
from warpattn.integrations.signature import Given, drop_in
from warpattn.masks import Causal, Materialized

__all__ = ["put_in_place"]

TOP_LEFT = Causal(top_left=True)
ROWS = 512  # query rows whose scores the CPU's backward holds at a time
DROPOUT = {"dropout_p": "there is no dropout: pass 0.0, as for inference"}
REFUSED = DROPOUT | {"return_debug_mask": "there is no debug mask: it shows where dropout hit"}
SCHEDULE = {"num_splits"}
RAGGED = (
    "query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p=0.0, is_causal=False, return_debug_mask=False, "
    "*, scale=None, window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, "
    "block_table=None, num_splits=None"
)


class Handle:
    """What torch keeps while we are active; `remove()` gives torch its own operators back."""

    def __init__(self, libraries: list[Library]) -> None:
        self.libraries = libraries

    def remove(self) -> None:
        while self.libraries:
            self.libraries.pop()._destroy()


def put_in_place() -> Handle:
    """Replace torch's operators until `remove()` of the result."""
    cpu, cuda = Library("aten", "IMPL", "CPU"), Library("aten", "IMPL", "CUDA")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "[\\s\\S]*[Oo]verriding a previously registered kernel", UserWarning)
        for name, kernel, libraries in OPERATORS:
            for library in libraries:
                (cpu if library == "CPU" else cuda).impl(name, kernel)
    return Handle([cpu, cuda])


@drop_in("query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None", REFUSED)
def _sdpa_cuda(given: Given) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_flash_attention: query (batch, heads, seq, dim)."""
    query = given.query
    out = torch.empty_like(query)  # strides as torch's kernel gives them
    lse = _dense(given, TOP_LEFT if given.is_causal else None, out)
    return out, lse, None, None, query.shape[2], given.key.shape[2], *_random_state(query)


@drop_in("query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None", DROPOUT)
def _sdpa_cpu(given: Given) -> tuple[Tensor, Tensor]:
    """aten::_scaled_dot_product_flash_attention_for_cpu: query (batch, heads, seq, dim), attn_mask is added."""
    mask = given.attn_mask
    if mask is not None:
        mask = Materialized(mask[(None,) * (4 - mask.ndim)])
    mask = TOP_LEFT if given.is_causal else mask
    out = given.query.new_empty((*given.query.shape[:-1], given.value.shape[-1]))
    with _graph(out):
        return out, _dense(given, mask, out)


@drop_in(
    "grad_out, query, key, value, out, logsumexp, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None",
    DROPOUT,
)
def _sdpa_backward_cpu(given: Given) -> tuple[Tensor, Tensor, Tensor]:
    """aten::_scaled_dot_product_flash_attention_for_cpu_backward, from the LSE of the forward operator."""
    exact = torch.float64 if given.query.dtype == torch.float64 else torch.float32
    q, k, v, out, grad = (x.to(exact) for x in (given.query, given.key, given.value, given.out, given.grad_out))
    heads, keys = q.shape[1], k.shape[2]
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if given.scale is None else given.scale
    weight = (grad * out).sum(-1, keepdim=True)
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for start in range(0, q.shape[2], ROWS):
        rows = slice(start, start + ROWS)
        s = q[:, :, rows] @ k.mT * scale
        if given.attn_mask is not None:
            s = s + given.attn_mask.to(exact).expand(*s.shape[:2], q.shape[2], keys)[:, :, rows]
        if given.is_causal:
            row = torch.arange(start, start + s.shape[2], device=s.device)[:, None]
            s = s.masked_fill(torch.arange(keys, device=s.device) > row, -torch.inf)
        lse = given.logsumexp[:, :, rows, None].to(exact)
        p = torch.exp(s - lse.masked_fill(lse == -torch.inf, 0.0))
        change = p * (grad[:, :, rows] @ v.mT - weight[:, :, rows]) * scale
        grad_q[:, :, rows] = change @ k
        grad_k += change.mT @ q[:, :, rows]
        grad_v += p.mT @ grad[:, :, rows]
    shared = [x.unflatten(1, (given.key.shape[1], -1)).sum(2) for x in (grad_k, grad_v)]
    grad_q, grad_k, grad_v = (x.to(given.query.dtype) for x in (grad_q, *shared))
    return grad_q, grad_k, grad_v


@drop_in(RAGGED, REFUSED, SCHEDULE)
def _flash(given: Given) -> tuple[Any, ...]:
    """aten::_flash_attention_forward: query (batch, seq, heads, dim), or (total, heads, dim) with cum_seq_q."""
    return *_ragged(given), *_random_state(given.query)


@drop_in(f"out, {RAGGED}", REFUSED, SCHEDULE)
def _flash_inplace(given: Given) -> Tensor:
    """aten::_flash_attention_forward_no_dropout_inplace: the same into `out`; gives the LSE."""
    out, lse = _ragged(given)
    given.out.copy_(out)
    return lse


def _no_backward(*_: Any, **__: Any) -> Any:
    """The backward operators, where the forward one could not see that a gradient is wanted."""
    rule = "the operator has no backward; run under torch.no_grad(), or restore_flash_attention_impl() to train"
    raise AttentionError(f"an input of flash attention requires gradients; {rule}")


def _dense(given: Given, mask: Any, out: Tensor) -> Tensor:
    """Attention into `out` (batch, heads, seq, dim); the LSE."""
    q, k, v, target = (x.transpose(1, 2) for x in (given.query, given.key, given.value, out))
    _, lse = attention(q, k, v, mask=mask, scale=given.scale, out=target, return_lse=True)
    return lse


def _ragged(given: Given) -> tuple[Tensor, Tensor]:
    window = (given.window_size_left, given.window_size_right)
    tail = Tail(visible(given.is_causal, window), scored(slopes=given.alibi_slopes), scale=given.scale)
    queries = packed.Queries(given.query, given.cum_seq_q, given.max_q)
    keys = packed.Keys(given.key, given.value, given.cum_seq_k, given.max_k, given.seqused_k, given.block_table)
    with _graph(given.query):
        if all(x is None for x in (given.cum_seq_q, given.cum_seq_k, given.seqused_k, given.block_table)):
            out, lse = attention(given.query, given.key, given.value, **tail._asdict(), return_lse=True)
            return out, lse
        return packed.attend(queries, keys, tail)


def _graph(x: Tensor) -> AbstractContextManager[Any]:
    """Operators run below autograd, so that a graph would be in vain; on CUDA gradients are to be refused."""
    return nullcontext() if x.is_cuda else torch.no_grad()


def _random_state(like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """rng_state, unused and debug mask: results that exist for dropout."""
    zeros = [torch.zeros(shape, dtype=torch.uint64, device=like.device) for shape in ((2,), ())]
    return zeros[0], zeros[1], like.new_empty(0)


OPERATORS: tuple[tuple[str, Callable[..., Any], tuple[str, ...]], ...] = (
    ("_scaled_dot_product_flash_attention", _sdpa_cuda, ("CUDA",)),
    ("_scaled_dot_product_flash_attention_for_cpu", _sdpa_cpu, ("CPU",)),
    ("_scaled_dot_product_flash_attention_for_cpu_backward", _sdpa_backward_cpu, ("CPU",)),
    ("_flash_attention_forward", _flash, ("CPU", "CUDA")),
    ("_flash_attention_forward_no_dropout_inplace", _flash_inplace, ("CPU", "CUDA")),
    ("_flash_attention_backward", _no_backward, ("CPU", "CUDA")),
    ("_scaled_dot_product_flash_attention_backward", _no_backward, ("CUDA",)),
)
