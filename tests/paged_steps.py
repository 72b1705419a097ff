"""Steps of an engine: ragged queries over a paged cache, as tensors that show what a kernel must leave alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.oracle import Inputs
from warpattn.masks import Causal, Mask
from warpattn.scores import Score, SoftCap
from warpattn.sequences import PagedKV, PagedRagged, Ragged

CAUSAL = Causal()


@dataclass(frozen=True)
class Step:
    """A step of an engine: queries and keys of every sequence."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: int = 4
    heads_kv: int = 2
    dim: int = 64
    page: int = 16
    max_q: int | None = None
    mask: Mask = CAUSAL
    score: Score | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.bfloat16
    invariant: bool = False
    decoded: int = 0
    config: tuple[tuple[str, object], ...] = ()  # fields of decode's configuration


def tensors(step: Step, padding: int = 0) -> Inputs:
    """Pages in any order, views of one tensor as vLLM has them; NaN where no key is, table entries past a sequence's
    pages outside of the cache, and `padding` rows of queries after the last sequence."""
    torch.manual_seed(0)
    batch, width = len(step.keys), max(1, -(-max(step.keys) // step.page))
    table = torch.randperm(batch * width + 1)[: batch * width].reshape(batch, width).int()
    cache = torch.full((batch * width + 1, step.heads_kv, step.page, 2 * step.dim), torch.nan, dtype=step.dtype)
    k_pages, v_pages = cache.transpose(1, 2).split(step.dim, -1)
    for b, length in enumerate(step.keys):
        for t in range(length):
            cache[table[b, t // step.page], :, t % step.page] = torch.randn(step.heads_kv, 2 * step.dim).to(step.dtype)
        table[b, -(-length // step.page) :] = 2**30
    cu_q = torch.tensor([0, *torch.tensor(step.queries).cumsum(0).tolist()], dtype=torch.int32)
    q = torch.randn(sum(step.queries) + padding, step.heads, step.dim).to(step.dtype)
    kv = PagedKV(k_pages, v_pages, table, torch.tensor(step.keys, dtype=torch.int32))
    sinks = torch.randn(step.heads) if step.sinks else None
    layout = PagedRagged(kv, Ragged(cu_q, max_q=step.max_q))
    return Inputs(q, k_pages, v_pages, layout, step.mask, step.score, sinks, soft_cap=isinstance(step.score, SoftCap))
