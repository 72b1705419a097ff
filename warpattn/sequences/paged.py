"""Paged keys and values: `PagedKV` with equally many queries per sequence, `PagedRagged` with any number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from warpattn.errors import Rules
from warpattn.inputs import kind_of
from warpattn.quantized import check_scale_values, rows_of_pages
from warpattn.sequences.ragged import Ragged, most
from warpattn.sequences.rules import (
    check_bound,
    check_index,
    check_offsets,
    check_shapes,
    check_shared,
    check_table,
    settle_ints,
)
from warpattn.sequences.sequence import Sequence, Sizes


@dataclass(frozen=True, eq=False)
class PagedKV(Sequence):
    """Keys and values in pages of a cache.

    k_pages (num_pages, page_size, Hkv, D), v_pages (num_pages, page_size, Hkv, Dv): any page size and strides.
    block_table: int32 (B, max_pages), the pages of each sequence in order; entries past a sequence's length are never
    read. lengths: int32 (B,), keys of each sequence, 0 allowed. The last query row sits at the last key.

    Pages of 8-bit values: k_scale, v_scale fp32, each of shape (), (Hkv,), (num_pages, page_size, Hkv) or (num_pages,
    page_size, Hkv, blocks) with blocks of 64 or 128 columns; None is 1. q_scale: the scale of 8-bit queries that are
    passed as a plain tensor. q_rope: the rotary part of queries that are no `LatentQuery`.

    shared_pages: promises that the first so many pages are the same in all rows of the table, and that all queries
    come after them, as after a common system prompt. Results do not change: with no mask or `Causal`, and no score or
    `SoftCap`, `attention_paged` reads them once for the batch (cascade attention); other calls and plans ignore it.
    """

    k_pages: Tensor
    v_pages: Tensor
    block_table: Tensor
    lengths: Tensor
    shared_pages: int = 0
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    q_scale: Tensor | None = None
    q_rope: Tensor | None = None
    kind: ClassVar[str] = "paged"
    scale_names: ClassVar[tuple[str, ...]] = ("kv.k_scale", "kv.v_scale", "q.scale")

    def __post_init__(self) -> None:
        super().__post_init__()
        settle_ints(self, "shared_pages")

    def with_fields(self, **fields: Any) -> PagedKV:
        """Return the same cache with other fields."""
        return replace(self, **fields)

    def operands(self, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        return {"q": q, "kv.k_pages": self.k_pages, "kv.v_pages": self.v_pages}

    def indices(self) -> dict[str, Tensor]:
        return {"kv.block_table": self.block_table, "kv.lengths": self.lengths} | self.beside()

    def check(self, rules: Rules, q: Tensor, k: Tensor, v: Tensor) -> bool:
        query = rules.tensor("q", q, "batch", "seq", "heads", "head_dim")
        indices = self.check_indices(rules, ("q", len(q)) if query else None)
        return self.check_pages(rules, q if query else None) and indices

    def check_indices(self, rules: Rules, like: tuple[str, int] | None) -> bool:
        """Note every broken rule of table and lengths; `like`: a tensor's name and batch, which they must match."""
        table = check_index(rules, "kv.block_table", self.block_table, "batch", "max_pages")
        lengths = check_index(rules, "kv.lengths", self.lengths, "batch")
        for ok, name, x in ((table, "block_table", self.block_table), (lengths, "lengths", self.lengths)):
            if ok and like is not None:
                what, batch = f"kv.{name} has shape {tuple(x.shape)}", f"the batch of {like[0]}, {like[1]}, rows"
                rules.require(len(x) == like[1], what, f"kv.{name} must have {batch}")
        shared = self.shared_pages
        fine = not table or (type(shared) is int and 0 <= shared < max(self.block_table.shape[1], 1))
        rule = "kv.shared_pages must be an int from 0 on, below the pages of a row of kv.block_table"
        rules.require(fine, f"kv.shared_pages is {kind_of(shared)}", rule)
        return table and lengths

    def check_pages(self, rules: Rules, q: Tensor | None) -> bool:
        """Note every broken rule of pages and of q's heads, if q is given; True if it is and ranks are right."""
        if not check_shapes(rules, self.k_pages, self.v_pages) or q is None:
            return False
        return self.check_queries(rules, q, self.k_pages, self.v_pages, "kv.k_pages", "kv.v_pages")

    def check_values(self, rules: Rules, sizes: Sizes, queries: list[int] | None = None) -> None:
        check_table(rules, self.lengths.tolist(), self.block_table.cpu(), self.k_pages)
        queries = [sizes.seq_q] * sizes.batch if queries is None else queries
        shared = (self.shared_pages, self.shared_pages * self.k_pages.shape[1])
        check_shared(rules, queries, self.lengths, self.block_table[:, : self.shared_pages], shared)
        of_tokens = {} if rules.broken else self.token_scales()
        used = self._used_rows() if of_tokens else None
        for name, scale in of_tokens.items():
            check_scale_values(rules, name, scale, used)

    def token_scales(self) -> dict[str, Tensor]:
        """Return the scales of keys and values that tokens have of their own, by name."""
        pairs = zip(self.scale_names, (self.k_scale, self.v_scale), strict=False)
        return {name: scale for name, scale in pairs if scale is not None and scale.ndim > 1}

    def _used_rows(self) -> Tensor:
        """Which rows (num_pages, page_size) hold a key; others have no scale yet."""
        size, device = self.k_pages.shape[1], self.block_table.device
        used = torch.zeros(self.k_pages.shape[:2], dtype=torch.bool, device=device)
        for pages, length in zip(self.block_table.long(), self.lengths.tolist(), strict=True):
            position = torch.arange(length, device=device)
            used[pages[position // size], position % size] = True
        return used

    def longest(self, sizes: Sizes) -> tuple[int, int]:
        return sizes.seq_q, most(self.lengths)

    def sizes(self, q: Tensor, k: Tensor, v: Tensor) -> Sizes:
        batch, seq_q, heads_q, _ = q.shape
        _, page_size, heads_kv, dim_v = self.v_pages.shape
        capacity = self.block_table.shape[1] * page_size
        return Sizes(batch, seq_q, capacity, heads_q, heads_kv, self.query_columns(q), dim_v, page_size)

    def walk(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for query, (keys, values) in zip(self.whole_queries(q), self.gathered(), strict=True):
            yield query, keys, values

    def gathered(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (k (Sk, Hkv, D), v (Sk, Hkv, Dv)) of each sequence of the batch."""
        page_size = self.k_pages.shape[1]
        for b, length in enumerate(self.lengths.tolist()):
            used = self.block_table[b, : -(-length // page_size)].long()
            pairs = ((self.k_pages, self.k_scale), (self.v_pages, self.v_scale))
            k, v = (rows_of_pages(pages, scale, used, length) for pages, scale in pairs)
            yield k, v


@dataclass(frozen=True, eq=False)
class PagedRagged(Sequence):
    """Queries laid end to end, keys and values in pages of a cache: any mix of prompts, parts of prompts and single new
    tokens.

    kv: the cache; the last query of each sequence sits at its last key. queries: row offsets of the queries and, as
    `max_q`, an upper bound of their number in a sequence; no offsets of keys.
    """

    kv: PagedKV
    queries: Ragged
    kind: ClassVar[str] = "paged-ragged"
    scale_names: ClassVar[tuple[str, ...]] = PagedKV.scale_names

    @property
    def cu_q(self) -> Tensor:
        """Row offsets of the queries."""
        return self.queries.cu_q

    @property
    def max_q(self) -> int | None:
        """An upper bound of the queries of a sequence."""
        return self.queries.max_q

    @property
    def k_scale(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.kv.k_scale

    @property
    def v_scale(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.kv.v_scale

    @property
    def q_scale(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.kv.q_scale

    @property
    def q_rope(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.kv.q_rope

    def operands(self, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        return self.kv.operands(q, k, v)

    def indices(self) -> dict[str, Tensor]:
        return {"seq.cu_q": self.cu_q, **self.kv.indices()}

    def bounds(self) -> tuple[int | None, ...]:
        return (self.max_q,)

    def check(self, rules: Rules, q: Tensor, k: Tensor, v: Tensor) -> bool:
        offsets = check_index(rules, "seq.cu_q", self.cu_q, "batch + 1")
        for name in ("cu_k", "max_k"):
            given = getattr(self.queries, name) is not None
            rules.require(not given, f"seq.{name} is given", "lengths say how many keys there are; it must be None")
        for name in ("k_scale", "v_scale", "q_scale", "q_rope"):
            given, what = getattr(self.queries, name) is not None, "scales belong" if "scale" in name else "it belongs"
            rules.require(not given, f"seq.{name} is given", f"over pages {what} to kv.{name}; it must be None")
        check_bound(rules, "max_q", self.queries.max_q)
        query = rules.tensor("q", q, "total", "heads", "head_dim")
        batch = len(self.cu_q) - 1 if offsets else 0
        if offsets:
            what = f"seq.cu_q has shape {tuple(self.cu_q.shape)}"
            rules.require(batch >= 0, what, "seq.cu_q must hold batch + 1 offsets")
        indices = self.kv.check_indices(rules, ("seq.cu_q", batch) if offsets and batch >= 0 else None)
        return self.kv.check_pages(rules, q if query else None) and offsets and indices

    def check_values(self, rules: Rules, sizes: Sizes) -> None:
        check_offsets(rules, "q", self.cu_q, sizes.seq_q, self.queries.max_q)
        self.kv.check_values(rules, sizes, self.cu_q.diff().tolist())

    def longest(self, sizes: Sizes) -> tuple[int, int]:
        return most(self.cu_q.diff()), most(self.kv.lengths)

    def sizes(self, q: Tensor, k: Tensor, v: Tensor) -> Sizes:
        total, heads_q, _ = q.shape
        _, page_size, heads_kv, dim_v = self.kv.v_pages.shape
        capacity, batch = self.kv.block_table.shape[1] * page_size, len(self.kv.lengths)
        max_q = min(total, self.queries.max_q) if isinstance(self.queries.max_q, int) else total
        return Sizes(batch, total, capacity, heads_q, heads_kv, self.query_columns(q), dim_v, page_size, max_q)

    def walk(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        q = self.whole_queries(q)
        rows = [q[first:last] for first, last in pairwise(self.cu_q.tolist())]
        for query, (keys, values) in zip(rows, self.kv.gathered(), strict=True):
            yield query, keys, values

    def join(self, outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
        return self.queries.join(outs, lses)

    def lse_shape(self, sizes: Sizes) -> tuple[int, ...]:
        return self.queries.lse_shape(sizes)
