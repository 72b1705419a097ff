"""What flash-attn's documentation says a call computes, written out for one sequence, for the tests of the drop-ins."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Rule = Callable[[Tensor, Tensor], Tensor]  # of a query's position (row + seq_k - seq_q) [Sq, 1] and a key [Sk]


def everything(i: Tensor, j: Tensor) -> Tensor:
    return (i >= j) | (i < j)


def causal(i: Tensor, j: Tensor) -> Tensor:
    return j <= i


def window(left: int, right: int) -> Rule:
    return lambda i, j: (j >= i - left) & (j <= i + right)


def attend(
    q: Tensor,  # [Sq, H, D]
    k: Tensor,  # [Sk, Hkv, D]
    v: Tensor,  # [Sk, Hkv, Dv]
    keep: Rule = everything,
    softcap: float = 0.0,
    slopes: Tensor | None = None,  # [H]
    sinks: Tensor | None = None,  # [H]
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """out [Sq, H, Dv] and lse [H, Sq], in the dtype of q."""
    (rows, heads, dim), keys = q.shape, len(k)
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    s = torch.einsum("ihd,jhd->hij", q, k) * (dim**-0.5 if scale is None else scale)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    i, j = torch.arange(rows)[:, None] + keys - rows, torch.arange(keys)
    if slopes is not None:
        s = s - slopes[:, None, None] * (i - j).abs()
    s = s.masked_fill(~keep(i, j), -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks[:, None, None].to(s.dtype).expand(heads, rows, 1)], -1)
    p = torch.softmax(s, -1).nan_to_num(0.0)[..., :keys]
    return torch.einsum("hij,jhd->ihd", p, v), torch.logsumexp(s, -1)


def batch(q: Tensor, k: Tensor, v: Tensor, *options: object, **named: object) -> tuple[Tensor, Tensor]:
    """`attend` for every sequence of a batch: out [B, Sq, H, Dv] and lse [B, H, Sq]."""
    outs, lses = zip(*(attend(*x, *options, **named) for x in zip(q, k, v, strict=True)), strict=True)
    return torch.stack(outs), torch.stack(lses)


def ragged(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, **named: object) -> tuple[Tensor, Tensor]:
    """`attend` for sequences end to end: out [total_q, H, Dv] and lse [H, total_q]."""
    a, b = cu_q.tolist(), cu_k.tolist()
    cut = [(slice(a[n], a[n + 1]), slice(b[n], b[n + 1])) for n in range(len(a) - 1)]
    outs, lses = zip(*(attend(q[i], k[j], v[j], **named) for i, j in cut), strict=True)
    return torch.cat(outs), torch.cat(lses, -1)
