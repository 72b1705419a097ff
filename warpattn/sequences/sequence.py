"""What a sequence kind is, and the kinds whose keys and values are tensors: dense and ragged batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from warpattn.errors import Rules
from warpattn.inputs import is_tensor, number
from warpattn.quantized import dequantized
from warpattn.sequences.latent_query import check_rope
from warpattn.sequences.rules import check_bound, check_index, check_offsets


@dataclass(frozen=True)
class Sizes:
    """Numbers read from tensor shapes. Ragged: lengths are totals. Paged: seq_k is what a row of the table holds."""

    batch: int
    seq_q: int
    seq_k: int
    heads_q: int
    heads_kv: int
    dim_qk: int
    dim_v: int
    page_size: int = 0
    max_q: int = 0  # queries of a sequence at most where `seq_q` is a total over pages


class Sequence:
    """One way to lay out a batch. `q`, `k`, `v` are the caller's; `PagedKV` ignores `k` and `v` and has its own."""

    kind: ClassVar[str]

    def operands(self, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """The tensors of attention by the names the caller knows them by, in the order query, key, value."""
        return {"q": q, "k": k, "v": v}

    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    q_scale: Tensor | None = None
    q_rope: Tensor | None = None  # the rotary part of queries in two tensors
    scale_names: ClassVar[tuple[str, ...]] = ("k.scale", "v.scale", "q.scale")

    def indices(self) -> dict[str, Tensor]:
        """Tensors of offsets, lengths and tables by name, then the scales, then the queries' rotary part."""
        return self.beside()

    def beside(self) -> dict[str, Tensor]:
        """Scales and the queries' rotary part, where they are given, by name."""
        return self.scales() if self.q_rope is None else self.scales() | {"q.rope": self.q_rope}

    def scales(self) -> dict[str, Tensor]:
        """Scales of 8-bit keys, values and queries that are given, by name."""
        named = zip(self.scale_names, (self.k_scale, self.v_scale, self.q_scale), strict=True)
        return {name: scale for name, scale in named if scale is not None}

    def __post_init__(self) -> None:
        k, v, q = self.k_scale, self.v_scale, self.q_scale
        if isinstance(v, Tensor) and v is k:  # each tensor of a call is an object of its own
            object.__setattr__(self, "v_scale", v.detach())
        if isinstance(q, Tensor) and (q is k or q is v):
            object.__setattr__(self, "q_scale", q.detach())

    def query_columns(self, q: Tensor) -> int:
        """Columns of the queries, those of their rotary part included."""
        return q.shape[-1] + (0 if self.q_rope is None else self.q_rope.shape[-1])

    def whole_queries(self, q: Tensor) -> Tensor:
        """The queries as one tensor, in fp32 where they have a scale."""
        return dequantized(q, self.q_scale) if self.q_rope is None else torch.cat([q, self.q_rope], -1)

    def dequantized(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The operands, queries in one tensor, in fp32 where they have scales."""
        return self.whole_queries(q), dequantized(k, self.k_scale), dequantized(v, self.v_scale)

    def check_queries(self, rules: Rules, q: Tensor, k: Tensor, v: Tensor, k_name: str, v_name: str) -> bool:
        """Rules of heads and head dims, and of a rotary part beside q; True if that has the right rank."""
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
    """A batch of equally long sequences: q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv), any strides."""

    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    q_scale: Tensor | None = None
    q_rope: Tensor | None = None
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
            rules.add(f"v has {v.shape[1]} keys", f"v must have as many keys as k, {k.shape[1]}")
        return self.check_queries(rules, q, k, v, "k", "v")

    def sizes(self, q: Tensor, k: Tensor, v: Tensor) -> Sizes:
        batch, seq_q, heads_q, _ = q.shape
        return Sizes(batch, seq_q, k.shape[1], heads_q, k.shape[2], self.query_columns(q), v.shape[3])

    def walk(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        q, k, v = self.dequantized(q, k, v)
        yield from zip(q, k, v, strict=True)


@dataclass(frozen=True, eq=False)
class Ragged(Sequence):
    """Sequences of different lengths laid end to end.

    cu_q: int32 (B + 1,), row offsets of the queries: 0, ascending, ending at total_q. cu_k: the same for keys and
    values; None when they share cu_q. max_q, max_k: upper bounds of the lengths, so that nothing is read back from a
    GPU to find them; None when unknown. k_scale, v_scale, q_scale: of 8-bit ones that are no `Quantized`. q_rope: the
    rotary part of queries that are no `LatentQuery`.
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
        for name in ("max_q", "max_k"):  # NumPy's ints and tensors without dimensions become ints
            bound = getattr(self, name)
            if bound is not None and type(bound) is not int:
                known = number(bound)
                object.__setattr__(self, name, bound if known is None else known)

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
        rules.require(len(k) == len(v), f"v has {len(v)} keys", f"v must have as many keys as k, {len(k)}")
        if self.cu_k is None:
            rule = f"without seq.cu_k the keys share the offsets of the queries, so k must have {len(q)} rows as q has"
            rules.require(len(k) == len(q), f"k has {len(k)} rows", rule)
        return self.check_queries(rules, q, k, v, "k", "v") and all(offsets)

    def check_values(self, rules: Rules, sizes: Sizes) -> None:
        check_offsets(rules, "q", self.cu_q, sizes.seq_q, self.max_q)
        keys = self.cu_q if self.cu_k is None else self.cu_k
        check_offsets(rules, "q" if self.cu_k is None else "k", keys, sizes.seq_k, self.max_k)

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


def check_heads(rules: Rules, q: Tensor, k: Tensor, v: Tensor, k_name: str, v_name: str, columns: int) -> None:
    """Rules of heads and head dimensions, which are the last two axes in every kind; columns: of whole queries."""
    heads_q, heads_k, heads_v = q.shape[-2], k.shape[-2], v.shape[-2]
    if heads_v != heads_k:
        rules.add(f"{v_name} has {heads_v} heads", f"{v_name} must have the heads of k, {heads_k}")
    if heads_q % heads_k if heads_k else heads_q:
        rule = "the query heads must be a multiple of the key heads"
        rules.add(f"q has {heads_q} heads and {k_name} has {heads_k}", rule)
    if k.shape[-1] != columns:
        rules.add(f"{k_name} has head_dim {k.shape[-1]}", f"it must have the head_dim of q, {columns}")
    for name, x in (("q", q), (v_name, v)):
        if x.shape[-1] == 0:
            rules.add(f"{name} has head_dim 0", "a head must have at least one element")
