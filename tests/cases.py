"""Named attention problems, built on demand on any device: shapes x masks x scores x sinks x heads x dtypes.

A `Case` is numbers and names only, so lists of cases cost nothing until `build`, and the same list serves the reference
on the CPU and a kernel on a card. Its seed comes from its name: a failing case can be built alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import and_, invert, or_

import torch
from torch import Tensor

import warpattn.language.expr as wx
from tests.oracle import Inputs
from warpattn.masks import (
    Causal,
    Chunked,
    CustomMask,
    Document,
    Full,
    Mask,
    Materialized,
    Padding,
    Prefix,
    SlidingWindow,
)
from warpattn.scores import ALiBi, Bias, CustomScore, Score, SoftCap
from warpattn.sequences import Dense, PagedKV, PagedRagged, Ragged, Sequence


@dataclass(frozen=True)
class Case:
    """One problem. `lens_q`, `lens_k` are the lengths of each sequence (ragged; paged uses lens_k)."""

    kind: str = "dense"
    batch: int = 2
    seq_q: int = 70
    seq_k: int = 70
    heads_q: int = 4
    heads_kv: int = 2
    dim: int = 16
    dim_v: int = 0  # 0: as dim
    dtype: torch.dtype = torch.float32
    mask: str = "full"
    score: str = "none"
    sinks: bool = False
    scale: float | None = None
    lens_q: tuple[int, ...] = ()
    lens_k: tuple[int, ...] = ()
    page_size: int = 0
    layout: str = "contiguous"  # or "heads-first"; "sliced", "unaligned": views into a wider tensor

    @property
    def name(self) -> str:
        """For test ids."""
        lengths = f"{_joined(self.lens_q) or self.seq_q}x{_joined(self.lens_k) or self.seq_k}"
        page = f"-page{self.page_size}" if self.page_size else ""
        dim = f"d{self.dim}v{self.dim_v}" if self.dim_v else f"d{self.dim}"
        tail = "-sinks" * self.sinks + f"-scale{self.scale}" * (self.scale is not None)
        layout = "" if self.layout == "contiguous" else f"-{self.layout}"
        shape = f"{self.kind}{page}-b{self.batch}-{lengths}-h{self.heads_q}.{self.heads_kv}-{dim}"
        return f"{shape}-{str(self.dtype)[6:]}-{self.mask}-{self.score}{tail}{layout}"

    @property
    def has_lse(self) -> bool:
        """Whether a test of the case returns an LSE, as about every second does: kernels without one are others."""
        return zlib.crc32(self.name.encode()) % 2 == 0

    @property
    def longest_q(self) -> int:
        return max(self.lens_q) if self.lens_q else self.seq_q

    @property
    def longest_k(self) -> int:
        lengths = self.lens_k or self.lens_q
        return max(lengths) if lengths else self.seq_k

    def build(self, device: torch.device | str = "cpu") -> Inputs:
        """The tensors and values of the case. Random numbers are made on the CPU: the same on every device."""
        make = Maker(self, device)
        q, k, v, sequence = make.operands()
        return Inputs(
            q=q,
            k=k,
            v=v,
            sequence=sequence,
            mask=mask_named(self.mask, make),
            score=SCORES[self.score](make),
            sinks=make.reals(self.heads_q) if self.sinks else None,
            scale=self.scale,
            soft_cap="softcap" in self.score,
        )


def _joined(lengths: tuple[int, ...]) -> str:
    return ".".join(str(length) for length in lengths)


class Maker:
    """Random tensors of one case."""

    def __init__(self, case: Case, device: torch.device | str) -> None:
        self.case, self.device = case, device
        self.generator = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return x.to(self.device, dtype or self.case.dtype)

    def reals(self, *shape: int) -> Tensor:
        """What masks, scores and sinks capture: fp32, or fp64 where the case is in fp64."""
        return self.normal(*shape, dtype=torch.float64 if self.case.dtype == torch.float64 else torch.float32)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Within low .. high - 1."""
        return torch.randint(low, high, shape, generator=self.generator).to(self.device, dtype)

    def coins(self, probability: float, *shape: int) -> Tensor:
        return (torch.rand(shape, generator=self.generator) < probability).to(self.device)

    def rows(self, *shape: int) -> Tensor:
        """Normal numbers (..., seq, heads, dim) in the memory layout of the case."""
        if self.case.layout == "heads-first":
            return self.normal(*shape).transpose(-3, -2).contiguous().transpose(-3, -2)
        if self.case.layout == "sliced":
            return self.normal(*shape[:-1], shape[-1] + 8)[..., : shape[-1]]
        if self.case.layout == "unaligned":
            return self.normal(*shape[:-1], shape[-1] + 1)[..., 1:]
        return self.normal(*shape)

    def operands(self) -> tuple[Tensor, Tensor, Tensor, Sequence]:
        c = self.case
        dim_v = c.dim_v or c.dim
        if c.kind == "dense":
            q = self.rows(c.batch, c.seq_q, c.heads_q, c.dim)
            k = self.rows(c.batch, c.seq_k, c.heads_kv, c.dim)
            return q, k, self.rows(c.batch, c.seq_k, c.heads_kv, dim_v), Dense()
        if c.kind == "ragged":
            keys = c.lens_k or c.lens_q
            sequence = Ragged(self.offsets(c.lens_q), self.offsets(c.lens_k) if c.lens_k else None)
            q = self.rows(sum(c.lens_q), c.heads_q, c.dim)
            k = self.rows(sum(keys), c.heads_kv, c.dim)
            return q, k, self.rows(sum(keys), c.heads_kv, dim_v), sequence
        cache = self.cache(dim_v)
        if c.kind == "paged-ragged":
            q, sequence = self.rows(sum(c.lens_q), c.heads_q, c.dim), PagedRagged(cache, Ragged(self.offsets(c.lens_q)))
            return q, cache.k_pages, cache.v_pages, sequence
        return self.rows(c.batch, c.seq_q, c.heads_q, c.dim), cache.k_pages, cache.v_pages, cache

    def offsets(self, lengths: tuple[int, ...]) -> Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).to(self.device, torch.int32)

    def cache(self, dim_v: int) -> PagedKV:
        """Pages in random order; everything past a length is NaN, table entries past it point nowhere."""
        c = self.case
        counts = [-(-length // c.page_size) for length in c.lens_k]
        pages = sum(counts) + 3
        order = torch.randperm(pages, generator=self.generator).tolist()
        table = torch.full((c.batch, max(counts, default=0) + 1), -7, dtype=torch.int32)
        k = self.normal(pages, c.page_size, c.heads_kv, c.dim)
        v = self.normal(pages, c.page_size, c.heads_kv, dim_v)
        used = torch.zeros(pages, c.page_size, dtype=torch.bool)
        for b, (length, count) in enumerate(zip(c.lens_k, counts, strict=True)):
            mine = [order.pop() for _ in range(count)]
            table[b, :count] = torch.tensor(mine, dtype=torch.int32)
            table[b, count:] = 2**30
            for position in range(length):
                used[mine[position // c.page_size], position % c.page_size] = True
        unused = ~used.to(self.device)
        k[unused], v[unused] = torch.nan, torch.nan
        lengths = torch.tensor(c.lens_k, dtype=torch.int32, device=self.device)
        return PagedKV(k, v, table.to(self.device), lengths)


def _padding(make: Maker) -> Mask:
    c = make.case
    lengths = make.integers(0, c.longest_k + 1, c.batch)
    lengths[0] = c.longest_k // 2
    return Padding(lengths)


def _few(make: Maker) -> Tensor:
    """At most 4 keys of each sequence."""
    return make.integers(0, min(5, make.case.longest_k + 1), make.case.batch)


def _documents(make: Maker) -> Mask:
    c = make.case
    return Document(make.integers(0, 4, c.batch, c.longest_k).sort(dim=-1).values)


def _scattered(make: Maker) -> Mask:
    """Documents whose keys are not next to each other, shared by the batch."""
    return Document(make.integers(0, 3, make.case.longest_k))


def _dense_mask(make: Maker) -> Mask:
    """Bool, per head; the first row of every head sees nothing."""
    c = make.case
    keep = make.coins(0.6, c.batch, c.heads_q, c.longest_q, c.longest_k)
    keep[..., :1, :] = False
    return Materialized(keep)


def _added_mask(make: Maker) -> Mask:
    """Float, the same for all heads, with hidden keys as -inf."""
    c = make.case
    added = make.reals(c.batch, c.longest_q, c.longest_k)
    hidden = make.coins(0.2, c.batch, c.longest_q, c.longest_k)
    return Materialized(added.masked_fill(hidden, -torch.inf))


def _striped(b, h, q, k, width):  # type: ignore[no-untyped-def]
    """A strided pattern that differs between heads."""
    return ((q + h) % width[h] == k % width[h]) | (k == b)


MASKS: dict[str, Callable[[Maker], Mask | None]] = {
    "none": lambda make: None,
    "full": lambda make: Full(),
    "causal": lambda make: Causal(),
    "causal-topleft": lambda make: Causal(top_left=True),
    "padding": _padding,
    "window": lambda make: SlidingWindow(9),
    "window-both": lambda make: SlidingWindow(7, right=5),
    "window-future": lambda make: SlidingWindow(7, right=None),
    "window-left-open": lambda make: SlidingWindow(None, right=3),
    "window-one": lambda make: SlidingWindow(1),
    "chunked": lambda make: Chunked(24),
    "prefix": lambda make: Prefix(11),
    "prefix-each": lambda make: Prefix(make.integers(0, make.case.longest_k + 1, make.case.batch)),
    "documents": _documents,
    "scattered": _scattered,
    "dense-mask": _dense_mask,
    "added-mask": _added_mask,
    "custom": lambda make: CustomMask(_striped, width=make.integers(2, 6, make.case.heads_q)),
    "causal-padding": lambda make: Causal() & _padding(make),
    "causal-window": lambda make: SlidingWindow(20) & Causal(),
    "causal-chunked": lambda make: Chunked(24) & Causal(),
    "causal-documents": lambda make: _documents(make) & Causal(),
    "causal-added": lambda make: _added_mask(make) & Causal(),
    "causal-or-prefix": lambda make: Causal() | Padding(_few(make)),
    "window-or-documents": lambda make: SlidingWindow(4) | _scattered(make),
    "not-causal": lambda make: ~Causal(),
    "not-window": lambda make: ~SlidingWindow(8, right=8),
    "nothing": lambda make: ~Full(),
}


def mask_named(name: str, make: Maker) -> Mask | None:
    """A mask of the list, or an expression such as "window | ~documents" of such without spaces."""
    for sign, joined in ((" | ", or_), (" & ", and_)):
        left, found, right = name.partition(sign)
        if found:
            return joined(mask_named(left, make), mask_named(right, make))
    return invert(mask_named(name[1:], make)) if name.startswith("~") else MASKS[name](make)


def _pull(s, b, h, q, k, gain, table):  # type: ignore[no-untyped-def]
    """Not linear, with captured tensors of floats and ints."""
    return wx.tanh(s * gain[h]) + gain[h] * wx.exp(-abs(q - k) / 16.0) - 0.1 * table[k % 5]


SCORES: dict[str, Callable[[Maker], Score | None]] = {
    "none": lambda make: None,
    "alibi": lambda make: ALiBi(make.case.heads_q),
    "alibi-slopes": lambda make: ALiBi(make.reals(make.case.batch, make.case.heads_q).abs()),
    "softcap": lambda make: SoftCap(2.0),
    "bias": lambda make: Bias(make.reals(make.case.batch, make.case.heads_q, make.case.longest_q, make.case.longest_k)),
    "bias-keys": lambda make: Bias(make.reals(1, make.case.longest_k)),
    "bias-heads": lambda make: Bias(make.reals(make.case.heads_q, 1, 1)),
    "custom": lambda make: CustomScore(_pull, gain=make.reals(make.case.heads_q), table=make.integers(-3, 4, 5)),
    "softcap-alibi": lambda make: SoftCap(3.0) | ALiBi(make.case.heads_q),
    "bias-softcap": lambda make: Bias(make.reals(1, make.case.longest_k)) | SoftCap(2.0),
}


def every_mask(base: Case) -> list[Case]:
    """The base with each mask in turn."""
    return [replace(base, mask=name) for name in MASKS]


def every_score(base: Case) -> list[Case]:
    """The base with each score in turn."""
    return [replace(base, score=name) for name in SCORES]


def every_head_count(base: Case) -> list[Case]:
    """Multi-head, grouped and multi-query heads."""
    return [replace(base, heads_q=q, heads_kv=kv) for q, kv in ((1, 1), (4, 4), (4, 2), (6, 2), (8, 1), (5, 1))]


def every_length(base: Case, unit: int) -> list[Case]:
    """Lengths around multiples of `unit`, the tile: one row, one key, more queries than keys, none of either."""
    sizes = [(1, 1), (1, 3), (unit, unit), (unit - 1, unit + 1), (unit + 1, unit - 1), (2 * unit + 3, 3 * unit + 5)]
    sizes += [(1, 2 * unit + 1), (2 * unit + 1, 1), (3 * unit, unit), (5, 0), (0, 5)]
    return [replace(base, seq_q=q, seq_k=k) for q, k in sizes]


def every_layout(base: Case) -> list[Case]:
    """Contiguous, heads before rows, and a view into wider rows."""
    return [replace(base, layout=layout) for layout in ("contiguous", "heads-first", "sliced")]


def every_combination(base: Case) -> list[Case]:
    """Masks with scores and sinks together: what one of them does must not undo the other."""
    pairs = [("causal", "softcap"), ("window", "alibi"), ("documents", "bias"), ("added-mask", "bias-softcap")]
    pairs += [("causal-padding", "custom"), ("custom", "custom"), ("not-causal", "alibi-slopes"), ("nothing", "none")]
    return [replace(base, mask=mask, score=score, sinks=True) for mask, score in pairs]


def ragged(base: Case) -> list[Case]:
    """Ragged batches: shared offsets, own key offsets, empty sequences."""
    shared = replace(base, kind="ragged", batch=3, lens_q=(5, 0, 33), lens_k=())
    cross = replace(base, kind="ragged", batch=4, lens_q=(5, 17, 1, 8), lens_k=(9, 3, 0, 40))
    return [shared, cross]


def paged(base: Case) -> list[Case]:
    """Paged caches of several page sizes; sequences shorter than the queries, empty, and of whole pages."""
    batch = replace(base, kind="paged", batch=4, seq_q=7, lens_k=(130, 0, 4, 64))
    return [replace(batch, page_size=size) for size in (1, 3, 16, 128)]


def kernel_cases(dim: int, dtype: torch.dtype) -> list[Case]:
    """Dense cases for a GPU kernel with tiles of up to 128 rows and keys, for one head dimension and dtype."""
    base = Case(batch=2, seq_q=300, seq_k=300, heads_q=4, heads_kv=2, dim=dim, dtype=dtype)
    lists = [every_mask(base), every_score(replace(base, mask="causal")), every_combination(base)]
    lists += [every_head_count(replace(base, mask="causal")), every_layout(base)]
    lists += [every_length(replace(base, mask=mask), 128) for mask in ("full", "causal")]
    return list(dict.fromkeys(case for cases in lists for case in cases))
