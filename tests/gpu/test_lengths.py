"""Ragged batches and paged caches on a Hopper card against plain PyTorch, and what must not be touched."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import warpattn as wa
from tests.cases import Case, every_mask, every_score
from tests.oracle import Inputs, check, poisoned

pytestmark = pytest.mark.gpu

MARGIN = 64
BASE = Case(dim=128, dtype=torch.bfloat16, heads_q=4, heads_kv=2, mask="causal")
RAGGED = replace(BASE, kind="ragged", batch=9, lens_q=(1, 63, 0, 65, 129, 64, 700, 300, 2))
CROSS = replace(BASE, kind="ragged", batch=6, lens_q=(65, 1, 129, 0, 7, 500), lens_k=(129, 0, 63, 12, 300, 900))
PAGED = replace(BASE, kind="paged", batch=6, seq_q=140, lens_k=(129, 0, 64, 1, 300, 1030), page_size=16)
SIZES = (1, 2, 3, 4, 8, 16, 24, 48, 64, 128, 256, 512)
MIXES = (RAGGED, CROSS, PAGED, replace(PAGED, page_size=64))


def named(cases: list[Case]) -> list[object]:
    return [pytest.param(case, id=case.name) for case in dict.fromkeys(cases)]


def attend(x: Inputs, case: Case, has_lse: bool = True) -> tuple[Tensor, Tensor | None]:
    """(out, lse or None); the output lies between margins, which the kernel must leave alone."""
    shape = (*x.q.shape[:-1], case.dim_v or case.dim)
    around = poisoned((shape[0] + 2 * MARGIN, *shape[1:]), x.q.dtype, x.q.device)
    tail = {"mask": x.mask, "score": x.score, "sinks": x.sinks, "scale": x.scale, "return_lse": has_lse}
    tail |= {"out": around[MARGIN:-MARGIN], "backend": "sm90"}
    if case.kind == "ragged":
        result = wa.attention_varlen(x.q, x.k, x.v, x.sequence, **tail)
    else:
        result = wa.attention_paged(x.q, x.sequence, **tail)
    out, lse = result if isinstance(result, tuple) else (result, None)
    assert around[:MARGIN].isnan().all() and around[-MARGIN:].isnan().all(), "neighbours are left alone"
    return out, lse


def check_case(case: Case) -> None:
    x = case.build("cuda")
    out, lse = attend(x, case, case.has_lse)
    check(x, out, lse)


@pytest.mark.parametrize("case", named([case for base in MIXES for case in every_mask(base)]))
def test_masks(case):
    check_case(case)


@pytest.mark.parametrize("case", named([case for base in MIXES for case in every_score(replace(base, sinks=True))]))
def test_scores_and_sinks(case):
    check_case(case)


PAGES = [replace(PAGED, page_size=size, dim=dim) for size in SIZES for dim in (64, 128, 256)]


@pytest.mark.parametrize("case", named(PAGES))
def test_page_sizes(case):
    check_case(case)


SHAPES = [replace(base, dim=dim, heads_q=8, heads_kv=8 // group)
          for base in MIXES for dim in (32, 64, 128, 256) for group in (1, 4, 8)]  # fmt: skip
SHAPES += [replace(base, dim=72, dim_v=40, dtype=torch.float16) for base in (*MIXES, replace(PAGED, page_size=3))]
SHAPES += [replace(base, dim=dim, heads_q=8) for base in (*MIXES, replace(PAGED, page_size=3)) for dim in (80, 208)]
SHAPES += [replace(base, layout="heads-first") for base in MIXES]


@pytest.mark.parametrize("case", named(SHAPES))
def test_heads_dims_and_layouts(case):
    check_case(case)


PACKED = [replace(base, dim=dim, heads_q=2 * group) for base in MIXES for dim, group in ((64, 3), (80, 5), (128, 7))]
PACKED += [replace(base, dim=192, dim_v=128, heads_q=12, mask="window", sinks=True) for base in MIXES]


@pytest.mark.parametrize("case", named(PACKED))
def test_heads_that_do_not_fill_the_rows_of_a_tile(case, monkeypatch):
    monkeypatch.setattr("warpattn.kernels.sm90.prefill.choice.UNFILLED", 0.2)
    check_case(case)


ABOVE_256 = [replace(base, dim=512) for base in MIXES]
ABOVE_256 += [replace(PAGED, dim=320, dim_v=264, page_size=3, dtype=torch.float16), replace(CROSS, dim=320)]


@pytest.mark.parametrize("case", named(ABOVE_256))
def test_head_dims_above_256(case):
    check_case(case)


@pytest.mark.parametrize("page_size", [3, 16, 128])
def test_heads_before_rows_in_the_pages(page_size):
    case = replace(PAGED, page_size=page_size)
    x = case.build("cuda")
    k, v = (pages.transpose(1, 2).contiguous().transpose(1, 2) for pages in (x.k, x.v))
    x = replace(x, k=k, v=v, sequence=replace(x.sequence, k_pages=k, v_pages=v))
    out, lse = attend(x, case)
    check(x, out, lse)


def test_hundreds_of_sequences_in_one_launch():
    generator = torch.Generator().manual_seed(0)
    lens = tuple(torch.randint(0, 200, (700,), generator=generator).tolist())
    check_case(replace(RAGGED, batch=700, lens_q=lens, heads_q=2, heads_kv=1))


@pytest.mark.parametrize("case", named(list(MIXES)))
def test_repeats_are_bit_identical(case):
    x = case.build("cuda")
    first, first_lse = attend(x, case)
    for _ in range(15):
        out, lse = attend(x, case)
        assert torch.equal(out, first) and torch.equal(lse, first_lse)


@pytest.mark.parametrize("case", named([RAGGED, CROSS, replace(PAGED, page_size=64), replace(PAGED, page_size=3)]))
def test_a_sequence_of_nan_stays_alone(case):
    """What a box reads past the end of a sequence is its neighbour; zeros must take its place before P·V."""
    x = case.build("cuda")
    plain, _ = attend(x, case)
    if case.kind == "ragged":
        keys = (x.sequence.cu_q if x.sequence.cu_k is None else x.sequence.cu_k).tolist()
        rows = x.sequence.cu_q.tolist()
        x.k[keys[4] : keys[5]], x.v[keys[4] : keys[5]] = torch.nan, torch.nan
        others = torch.ones(len(x.q), dtype=torch.bool)
        others[rows[4] : rows[5]] = False
    else:
        mine = x.sequence.block_table[4, : -(-case.lens_k[4] // case.page_size)].long()
        x.k[mine], x.v[mine] = torch.nan, torch.nan
        others = torch.arange(case.batch) != 4
    out, _ = attend(x, case)
    assert torch.equal(out[others.cuda()], plain[others.cuda()]) and out[~others.cuda()].isnan().any()


def test_a_graph_follows_lengths_on_the_device():
    """One captured launch serves other lengths: nothing of them was read on the host."""
    case = replace(PAGED, mask="causal")
    x = case.build("cuda")
    out = poisoned((*x.q.shape[:-1], case.dim), x.q.dtype, x.q.device)
    tail = {"mask": x.mask, "out": out, "backend": "sm90"}
    wa.attention_paged(x.q, x.sequence, **tail)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wa.attention_paged(x.q, x.sequence, **tail)
    for lengths in ((129, 0, 64, 1, 300, 1030), (100, 0, 2, 1, 17, 1), (0, 0, 64, 0, 0, 513)):
        x.sequence.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        out.fill_(torch.nan)
        graph.replay()
        check(x, out)
