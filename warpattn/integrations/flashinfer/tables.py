"""Turns FlashInfer's lists of pages (CSR) into a `PagedKV`.

    indptr (0, 2, 3)  indices (7, 4, 1)  last_page_len (5, 16)        request 0: pages 7 and 4, 5 rows of the latter

    block_table  7 4        lengths  21
                 1 .                 16
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpattn.errors import AttentionError, Rules, many
from warpattn.inputs import is_tensor, kind_of
from warpattn.integrations.flashinfer.layer import all_of, eight_bit_scale, heads_last
from warpattn.integrations.signature import Given
from warpattn.language.traced import MAX_INT
from warpattn.sequences import PagedKV
from warpattn.serving.filled import fill

Cache = Tensor | tuple[Tensor, Tensor]


class PageLists(NamedTuple):
    """The pages of a batch."""

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    page_size: int


class Tables:
    """Block table and lengths of a planned batch. With `fixed`, the largest (requests, pages of all requests), they
    stay at fixed addresses, for captured graphs."""

    def __init__(self, fixed: tuple[int, int] | None = None) -> None:
        self.fixed = fixed
        self.table: Tensor | None = None
        self.lengths: Tensor | None = None
        self.own: tuple[Tensor, Tensor] | None = None  # made of lists
        self.sizes = (0, 0)  # rows of a page, fewest pages of a cache

    def plan(self, lists: PageLists, device: torch.device) -> None:
        """Make or overwrite table and lengths. Reads the lists back from a card."""
        indptr, last = lists.indptr.to("cpu", torch.int64), lists.last_page_len.to("cpu", torch.int64)
        if not len(indptr):
            raise AttentionError("indptr is empty; it begins with 0")
        counts = indptr.diff()
        batch, most = len(counts), int(counts.max()) if len(counts) else 0
        width = max(most, 1) if self.fixed is None else self.fixed[1]
        if len(last) != batch or bool((counts < 0).any()) or int(indptr[-1]) > len(lists.indices):
            what = f"indptr lists {many(batch, 'request')} and {many(int(indptr[-1]), 'page')}"
            raise AttentionError(f"{what}; last_page_len has {len(last)} and indices {len(lists.indices)}")
        pages, size = lists.indices[: int(indptr[-1])].to("cpu", torch.int64), lists.page_size
        _check_lists(int(indptr[0]), pages, last[counts > 0], size)
        if self.fixed is not None and (batch != self.fixed[0] or most > width):
            rule = f"the wrapper was made for graphs of {many(self.fixed[0], 'request')} with up to {width}"
            raise AttentionError(f"the batch has {many(batch, 'request')} with up to {many(most, 'page')}; {rule}")
        taken = torch.arange(width, device="cpu") < counts[:, None]
        table = torch.zeros(batch, width, dtype=torch.int32, device="cpu")
        table[taken] = pages.to(torch.int32)
        lengths = torch.where(counts > 0, (counts - 1) * size + last, 0).to(torch.int32)
        self.sizes = (size, int(pages.max()) + 1 if len(pages) else 0)
        if self.fixed is None or self.own is None:
            self.own = table.to(device), lengths.to(device)
        else:
            for own, new in zip(self.own, (table, lengths), strict=True):
                fill(own, new)
        self.table, self.lengths = self.own

    def hold(self, table: Tensor, lengths: Tensor, page_size: int) -> None:
        """Use the caller's table and lengths in place; copies them only if they are not int32."""
        if len(table) != len(lengths):
            raise AttentionError(f"block_tables lists {many(len(table), 'request')}; seq_lens has {len(lengths)}")
        self.table, self.lengths, self.sizes = table.int(), lengths.int(), (page_size, 0)

    def check(self, name: str, pages: Tensor) -> None:
        """Check that pages (pages, rows, …) of a cache fit the plan."""
        (size, least), (count, rows) = self.sizes, pages.shape[:2]
        if rows != size or count < least:
            rule = f"the plan was made for pages of {many(size, 'row')}, {least} of them at least"
            raise AttentionError(f"{name} has {many(count, 'page')} of {many(rows, 'row')}; {rule}")

    def over(self, cache: Cache, layout: str, given: Given) -> PagedKV:
        """Return the planned batch over a cache, with the call's scales if it has 8 bits."""
        if self.table is None or self.lengths is None:
            raise AttentionError("run is called before plan; plan says which pages belong to each request")
        k, v = key_and_value(cache, layout)
        k_scale, v_scale, _ = all_of(
            lambda: eight_bit_scale("k_scale", given, k),
            lambda: eight_bit_scale("v_scale", given, v),
            lambda: self.check("paged_kv_cache", k),
        )
        return PagedKV(k, v, self.table, self.lengths, k_scale=k_scale, v_scale=v_scale)


def _check_lists(first: int, pages: Tensor, last: Tensor, size: int) -> None:
    """Check lists on the host; `last` is of the requests that have pages."""
    rules = Rules()
    rules.require(first == 0, f"indptr begins with {first}", "it must begin with 0")
    rules.require(size > 0, f"page_size is {size}", "it must be an int from 1 on")
    for name, x, most in (("indices", pages, MAX_INT), ("last_page_len", last, size)):
        wrong = x[(x < 0) | (x > most)]
        what = f"{name} holds {int(wrong[0])}" if len(wrong) else ""
        rules.require(not len(wrong), what, f"its elements must be within 0 .. {most}")
    rules.done()


def key_and_value(cache: Cache, layout: str) -> tuple[Tensor, Tensor]:
    """Split a cache, a pair or a tensor with both in dimension 1, into pages (pages, rows, heads, dim)."""
    if isinstance(cache, Tensor):
        if cache.ndim != 5 or cache.shape[1] != 2:
            rule = "it must be (pages, 2, …) or a pair of keys and values"
            raise AttentionError(f"paged_kv_cache is {kind_of(cache)}; {rule}")
        cache = cache[:, 0], cache[:, 1]
    if not isinstance(cache, tuple | list) or len(cache) != 2 or not all(is_tensor(x) and x.ndim == 4 for x in cache):
        rule = "it must be one tensor (pages, 2, …) or a pair of keys and values, each of rank 4"
        raise AttentionError(f"paged_kv_cache is {kind_of(cache)}; {rule}")
    k, v = cache
    return heads_last(k, layout), heads_last(v, layout)


def kept_offsets(own: Any, name: str, given: Tensor) -> tuple[Tensor, int]:
    """Return int32 offsets on a wrapper's device, at a fixed address for graphs, and the longest sequence."""
    host = given.to("cpu", torch.int32)
    kept = own.offsets.get(name)
    if kept is None or not own.is_cuda_graph_enabled:
        kept = own.offsets[name] = host.to(own.device, copy=True)  # the caller may write his own again
    elif len(kept) != len(host):
        raise AttentionError(f"{name} has {many(len(host), 'offset')}; the graph was made for {len(kept)}")
    else:
        fill(kept, host)
    return kept, int(host.diff().max()) if len(host) > 1 else 0
