"""`Sequence`, the base class of layouts of a batch, and `Dense`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from warpattn.errors import Rules, many
from warpattn.inputs import is_tensor
from warpattn.quantized import dequantized
from warpattn.sequences.latent_query import check_rope


@dataclass(frozen=True)
class Sizes:
    """Numbers read from tensor shapes. Ragged: lengths are totals. Paged: seq_k is the capacity of a table row."""

    batch: int
    seq_q: int
    seq_k: int
    heads_q: int
    heads_kv: int
    dim_qk: int
    dim_v: int
    page_size: int = 0
    max_q: int = 0  # paged ragged: most queries of a sequence; else 0


class Sequence:
    """A layout of a batch. Methods get the caller's `q`, `k`, `v`; `PagedKV` ignores `k` and `v` and has its own."""

    kind: ClassVar[str]

    def operands(self, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """Return query, key and value tensors, in this order, by the names that the caller knows."""
        return {"q": q, "k": k, "v": v}

    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    q_scale: Tensor | None = None
    q_rope: Tensor | None = None  # the rotary part of queries in two tensors
    v_transposed: Tensor | None = None  # 8-bit values once more, see `Quantized`
    scale_names: ClassVar[tuple[str, ...]] = ("k.scale", "v.scale", "q.scale")

    def indices(self) -> dict[str, Tensor]:
        """Tensors of offsets, lengths and tables by name, then those of `beside`."""
        return self.beside()

    def beside(self) -> dict[str, Tensor]:
        """Return the given scales, rotary part of queries and transposed values, by name."""
        more = {"q.rope": self.q_rope, "v.transposed": self.v_transposed}
        return self.scales() | {name: x for name, x in more.items() if x is not None}

    def scales(self) -> dict[str, Tensor]:
        """Return the given scales of 8-bit keys, values and queries, by name."""
        named = zip(self.scale_names, (self.k_scale, self.v_scale, self.q_scale), strict=True)
        return {name: scale for name, scale in named if scale is not None}

    def __post_init__(self) -> None:
        k, v, q = self.k_scale, self.v_scale, self.q_scale
        if isinstance(v, Tensor) and v is k:  # tensors of a call are separate objects
            object.__setattr__(self, "v_scale", v.detach())
        if isinstance(q, Tensor) and (q is k or q is v):
            object.__setattr__(self, "q_scale", q.detach())

    def query_columns(self, q: Tensor) -> int:
        """Return the columns of the queries with their rotary part."""
        return q.shape[-1] + (0 if self.q_rope is None else self.q_rope.shape[-1])

    def whole_queries(self, q: Tensor) -> Tensor:
        """Return the queries as one tensor, in fp32 if they have a scale."""
        return dequantized(q, self.q_scale) if self.q_rope is None else torch.cat([q, self.q_rope], -1)

    def dequantized(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the operands, queries in one tensor, in fp32 where they have scales."""
        return self.whole_queries(q), dequantized(k, self.k_scale), dequantized(v, self.v_scale)

    def check_queries(self, rules: Rules, q: Tensor, k: Tensor, v: Tensor, k_name: str, v_name: str) -> bool:
        """Check heads, head dims and the rotary part of q; True if that has the right rank."""
        fine = self.q_rope is None or check_rope(rules, q, self.q_rope)
        if fine:
            check_heads(rules, q, k, v, k_name, v_name, self.query_columns(q))
        return fine

    def bounds(self) -> tuple[int | None, ...]:
        """Promised upper bounds of lengths."""
        return ()

    def check(self, rules: Rules, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Note every broken rule about types, ranks and shapes; True if the ranks are right, so that `sizes` works."""
        raise NotImplementedError

    def check_values(self, rules: Rules, sizes: Sizes) -> None:
        """Note every offset, length and table entry out of range. Copies them to the host."""

    def longest(self, sizes: Sizes) -> tuple[int, int]:
        """Queries and keys of the longest sequences. Reads offsets and lengths back to the host."""
        return sizes.seq_q, sizes.seq_k

    def sizes(self, q: Tensor, k: Tensor, v: Tensor) -> Sizes:
        """Sizes of checked tensors."""
        raise NotImplementedError

    def walk(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield (q (Sq, Hq, D), k (Sk, Hkv, D), v (Sk, Hkv, Dv)) of each sequence of the batch."""
        raise NotImplementedError

    def join(self, outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Put per-sequence outputs (Sq, Hq, Dv) and LSEs (Hq, Sq) into the shapes the caller gets."""
        return torch.stack(outs), torch.stack(lses)

    def lse_shape(self, sizes: Sizes) -> tuple[int, ...]:
        """(B, Hq, Sq); (Hq, total_q) for ragged batches."""
        return (sizes.batch, sizes.heads_q, sizes.seq_q)


@dataclass(frozen=True, eq=False)
class Dense(Sequence):
    """A batch of equally long sequences: q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv), any strides.

    Scales and v_transposed are those of 8-bit tensors, q_rope is the rotary part of queries in two tensors.
    """

    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    q_scale: Tensor | None = None
    q_rope: Tensor | None = None
    v_transposed: Tensor | None = None
    kind: ClassVar[str] = "dense"

    def check(self, rules: Rules, q: Tensor, k: Tensor, v: Tensor) -> bool:
        axes = ("batch", "seq", "heads", "head_dim")
        named = self.operands(q, k, v).items()
        ranks = [(is_tensor(x) and x.ndim == len(axes)) or rules.tensor(name, x, *axes) for name, x in named]
        if not all(ranks):
            return False
        for name, x in (("k", k), ("v", v)):
            if x.shape[0] != q.shape[0]:
                rules.add(f"{name} has batch {x.shape[0]}", f"{name} must have the batch of q, {q.shape[0]}")
        if k.shape[1] != v.shape[1]:
            rules.add(f"v has {many(v.shape[1], 'key')}", f"v must have as many keys as k, {k.shape[1]}")
        return self.check_queries(rules, q, k, v, "k", "v")

    def sizes(self, q: Tensor, k: Tensor, v: Tensor) -> Sizes:
        batch, seq_q, heads_q, _ = q.shape
        return Sizes(batch, seq_q, k.shape[1], heads_q, k.shape[2], self.query_columns(q), v.shape[3])

    def walk(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        q, k, v = self.dequantized(q, k, v)
        yield from zip(q, k, v, strict=True)


def check_heads(rules: Rules, q: Tensor, k: Tensor, v: Tensor, k_name: str, v_name: str, columns: int) -> None:
    """Check heads and head dims, the last two axes in every kind; columns: those of whole queries."""
    heads_q, heads_k, heads_v = q.shape[-2], k.shape[-2], v.shape[-2]
    if heads_v != heads_k:
        rules.add(f"{v_name} has {many(heads_v, 'head')}", f"{v_name} must have the heads of k, {heads_k}")
    if heads_q % heads_k if heads_k else heads_q:
        rule = "the query heads must be a multiple of the key heads"
        rules.add(f"q has {many(heads_q, 'head')} and {k_name} has {heads_k}", rule)
    if k.shape[-1] != columns:
        rules.add(f"{k_name} has head_dim {k.shape[-1]}", f"it must have the head_dim of q, {columns}")
    for name, x in (("q", q), (v_name, v)):
        if x.shape[-1] == 0:
            rules.add(f"{name} has head_dim 0", "a head must have at least one element")
