"""Ragged batches: sequences of different lengths laid end to end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from warpattn.errors import AttentionError, Rules, many
from warpattn.inputs import of_type
from warpattn.quantized import Quantized, split
from warpattn.sequences.latent_query import WITH_PARTS, LatentQuery, check_once, parted
from warpattn.sequences.rules import check_bound, check_index, check_offsets, settle_ints
from warpattn.sequences.sequence import Sequence, Sizes


@dataclass(frozen=True, eq=False)
class Ragged(Sequence):
    """Sequences of different lengths laid end to end.

    cu_q: int32 (B + 1,), row offsets of the queries: 0, ascending, ending at total_q. cu_k: the same for keys and
    values; None when they share cu_q. max_q, max_k: upper bounds of the lengths, so that nothing is read back from a
    GPU to find them; None when unknown. k_scale, v_scale, q_scale: scales of plain 8-bit tensors. q_rope: the rotary
    part of queries that are no `LatentQuery`.
    """

    cu_q: Tensor
    cu_k: Tensor | None = None
    max_q: int | None = None
    max_k: int | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    q_scale: Tensor | None = None
    q_rope: Tensor | None = None
    kind: ClassVar[str] = "ragged"

    def __post_init__(self) -> None:
        super().__post_init__()
        settle_ints(self, "max_q", "max_k")

    def indices(self) -> dict[str, Tensor]:
        return {"seq.cu_q": self.cu_q} | ({} if self.cu_k is None else {"seq.cu_k": self.cu_k}) | self.beside()

    def bounds(self) -> tuple[int | None, ...]:
        return (self.max_q, self.max_k)

    def check(self, rules: Rules, q: Tensor, k: Tensor, v: Tensor) -> bool:
        named = [("seq.cu_q", self.cu_q), *([] if self.cu_k is None else [("seq.cu_k", self.cu_k)])]
        offsets = [check_index(rules, name, x, "batch + 1") for name, x in named]
        check_bound(rules, "max_q", self.max_q)
        check_bound(rules, "max_k", self.max_k)
        if all(offsets):
            what = f"seq.cu_q has shape {tuple(self.cu_q.shape)}"
            rules.require(len(self.cu_q) >= 1, what, "seq.cu_q must hold batch + 1 offsets")
            if self.cu_k is not None:
                what = f"seq.cu_k has shape {tuple(self.cu_k.shape)}"
                same = self.cu_k.shape == self.cu_q.shape
                rules.require(same, what, f"seq.cu_k must have the shape of seq.cu_q, {tuple(self.cu_q.shape)}")
        ranks = [rules.tensor(name, x, "total", "heads", "head_dim") for name, x in self.operands(q, k, v).items()]
        if not all(ranks):
            return False
        rules.require(len(k) == len(v), f"v has {many(len(v), 'key')}", f"v must have as many keys as k, {len(k)}")
        if self.cu_k is None:
            rule = f"without seq.cu_k the keys share the offsets of the queries, so k must have as many as q, {len(q)}"
            rules.require(len(k) == len(q), f"k has {many(len(k), 'row')}", rule)
        return self.check_queries(rules, q, k, v, "k", "v") and all(offsets)

    def check_values(self, rules: Rules, sizes: Sizes) -> None:
        check_offsets(rules, "q", self.cu_q, sizes.seq_q, self.max_q)
        keys = self.cu_q if self.cu_k is None else self.cu_k
        check_offsets(rules, "q" if self.cu_k is None else "k", keys, sizes.seq_k, self.max_k)

    def longest(self, sizes: Sizes) -> tuple[int, int]:
        most_q, most_k = (most(x.diff()) for x in (self.cu_q, self.cu_q if self.cu_k is None else self.cu_k))
        return most_q, most_k

    def sizes(self, q: Tensor, k: Tensor, v: Tensor) -> Sizes:
        total_q, heads_q, _ = q.shape
        return Sizes(len(self.cu_q) - 1, total_q, len(k), heads_q, k.shape[1], self.query_columns(q), v.shape[2])

    def walk(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        q, k, v = self.dequantized(q, k, v)
        rows = self.cu_q.tolist()
        keys = rows if self.cu_k is None else self.cu_k.tolist()
        for b in range(len(rows) - 1):
            span = slice(keys[b], keys[b + 1])
            yield q[rows[b] : rows[b + 1]], k[span], v[span]

    def join(self, outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
        return torch.cat(outs), torch.cat(lses, dim=1)

    def lse_shape(self, sizes: Sizes) -> tuple[int, ...]:
        return (sizes.heads_q, sizes.seq_q)


def most(lengths: Tensor) -> int:
    """Return the largest length, 0 if there are none."""
    return max(lengths.tolist(), default=0)


def with_parts(
    q: Tensor | Quantized | LatentQuery, k: Tensor | Quantized, v: Tensor | Quantized, seq: Ragged
) -> tuple[Tensor, Tensor, Tensor, Ragged]:
    """Return plain tensors, and `seq` with their scales and rotary part; raises AttentionError if it is no Ragged."""
    if not isinstance(seq, Ragged):
        raise AttentionError(f"seq is {of_type(seq)}; seq must be a warpattn Ragged(cu_q, cu_k)")
    if not (isinstance(q, WITH_PARTS) or isinstance(k, Quantized) or isinstance(v, Quantized)):
        return q, k, v, seq
    (rows, brought), (keys, k_scale), (values, v_scale) = parted(q), split(k), split(v)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    brought = brought | {name: scale for name, scale in scales.items() if scale is not None}
    check_once("seq", seq, brought)
    return rows, keys, values, replace(seq, **brought)


def promised(seq: Ragged) -> dict[str, int]:
    """Return the upper bounds of lengths that hold for every call of a plan, by name."""
    given = {"max_q": seq.max_q, "max_k": seq.max_k}
    return {name: bound for name, bound in given.items() if bound is not None}


def check_bounds(seq: Ragged, bounds: dict[str, int]) -> None:
    """Raise AttentionError if a call promises less than the plan's `bounds`."""
    for name, most in bounds.items():
        bound = getattr(seq, name)
        if bound is not None and not (isinstance(bound, int) and bound <= most):
            raise AttentionError(f"seq.{name} is {bound!r}; the plan was made for sequences of up to {most}")


def bounded(seq: Ragged, bounds: dict[str, int]) -> Ragged:
    """Return the offsets with the plan's `bounds` where the call gives none: kernels rely on them."""
    missing = {name: most for name, most in bounds.items() if getattr(seq, name) is None}
    return replace(seq, **missing) if missing else seq
