"""Ragged batches and paged caches on Hopper in the simulator: right values, no findings, neighbours left alone."""

from collections.abc import Collection
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import Case
from tests.drawn import drawn, in_turn
from tests.oracle import check
from tests.sim.sm90.lengths import findings, in_parts, ready_for, run
from warpattn.kernels.sm90.prefill import choice

SCHEDULES = [("eager", 0), ("lazy", 0), ("adversarial", 0), *(("random", seed) for seed in range(3))]
BASE = Case(dim=64, dtype=torch.bfloat16, heads_q=2, heads_kv=1, mask="causal")
RAGGED = replace(BASE, kind="ragged", batch=6, lens_q=(1, 63, 0, 65, 129, 64))
CROSS = replace(BASE, kind="ragged", batch=5, lens_q=(65, 1, 129, 0, 7), lens_k=(129, 0, 63, 12, 300))
PAGED = replace(BASE, kind="paged", batch=5, seq_q=65, lens_k=(129, 0, 64, 1, 300))

MASKS = ("full", "window", "prefix-each", "documents", "custom", "causal-topleft", "not-window", "nothing")
SCORES = ("softcap", "alibi", "bias", "custom")
CASES = [
    *[replace(base, mask=mask) for mask in MASKS for base in (RAGGED, CROSS)],
    *[replace(base, score=score, sinks=True) for score in SCORES for base in (RAGGED, CROSS)],
    *[replace(base, heads_q=4, heads_kv=4 // group) for group in (1, 4) for base in (RAGGED, CROSS)],
    replace(CROSS, heads_q=8, mask="full"),
    *[replace(base, dim=dim) for dim in (128, 256) for base in (RAGGED, CROSS)],
    replace(CROSS, dim=72, dim_v=40, dtype=torch.float16, layout="heads-first"),
    *[replace(base, dim=dim) for dim in (80, 192) for base in (RAGGED, CROSS)],
    *[replace(PAGED, page_size=size, dim=dim) for dim in (96, 216) for size in (3, 16, 64)],
    *[replace(PAGED, page_size=size) for size in (1, 3, 8, 16, 48, 64, 128, 256)],
    *[replace(PAGED, page_size=64, mask=mask) for mask in MASKS],
    *[replace(PAGED, page_size=16, score=score, sinks=True) for score in SCORES],
    *[replace(PAGED, page_size=16, heads_q=heads, heads_kv=heads_kv) for heads, heads_kv in ((3, 3), (8, 2), (8, 1))],
    *[replace(PAGED, page_size=size, dim=dim) for dim in (128, 256) for size in (3, 16, 64)],
    replace(PAGED, page_size=32, dim=72, dim_v=40, dtype=torch.float16, layout="sliced"),
    replace(PAGED, page_size=3, dim=72, dim_v=40, dtype=torch.float16),
    replace(PAGED, page_size=16, seq_q=1, batch=2, lens_k=(1, 40)),
]
# One of each kind of sequences; other masks and scores are drawn for other kernels.
DRAWN = [
    replace(RAGGED, mask="prefix-each", score="bias", sinks=True),
    replace(PAGED, page_size=16, seq_q=1, batch=2, lens_k=(1, 40)),
]
CASES += [
    replace(CROSS, mask="documents", score="custom", sinks=True),
    replace(RAGGED, mask="not-window", dim=256, heads_kv=2),
    replace(PAGED, page_size=8, mask="custom", score="alibi", sinks=True),
    replace(RAGGED, mask="full", score="softcap", sinks=True),
    replace(CROSS, mask="causal-topleft", dim=192),
    replace(PAGED, page_size=48, mask="window"),
    replace(CROSS, mask="window", score="alibi", sinks=True),
    replace(RAGGED, mask="custom", dim=128),
    replace(CROSS, mask="nothing", heads_q=4),
    replace(PAGED, page_size=256, mask="documents", score="bias", sinks=True),
    replace(PAGED, page_size=1, mask="prefix-each", dim=128),
    replace(PAGED, page_size=64, dim=96),
]
FEW = [RAGGED, CROSS, *[replace(PAGED, page_size=size) for size in (3, 16, 64)]]
FEW += [replace(CROSS, dim=128), replace(PAGED, dim=128, page_size=16)]


def named(cases: list[Case], left_out: Collection[Case] = ()) -> list[object]:
    marks = {case: pytest.mark.full if case in left_out else () for case in cases}
    return [pytest.param(case, id=case.name, marks=marks[case]) for case in marks]


def run_and_check(case: Case, **options: object) -> None:
    x = case.build()
    out, lse, reports = run(x, **options)
    assert not findings(reports)
    check(x, out, lse)


@pytest.mark.parametrize("case", named([*DRAWN, *CASES], set(CASES) - set(DRAWN)))
def test_values(case):
    run_and_check(case, schedule="lazy")


@pytest.mark.parametrize(
    ("case", "schedule", "seed"), in_turn(FEW, [RAGGED], SCHEDULES, each=6), ids=lambda x: getattr(x, "name", x)
)
def test_every_schedule(case, schedule, seed):
    run_and_check(case, schedule=schedule, seed=seed)


PARTS = {
    "sequences": (replace(CROSS, sinks=True, heads_q=4), 3),
    "packed": (replace(CROSS, heads_q=8, mask="full", score="softcap"), 2),
    "pages": (replace(PAGED, page_size=16, heads_q=8, heads_kv=2, sinks=True), 4),
    "small pages": (replace(PAGED, page_size=3, mask="window"), 2),
    "head dim in parts": (replace(RAGGED, dim=192), 2),
}


@pytest.mark.full
@pytest.mark.parametrize("name", drawn(PARTS, ["pages"]))
def test_keys_in_parts(name):
    """More parts than some sequences have key tiles; rows of no sequence keep their values."""
    case, parts = PARTS[name]
    run_and_check(case, parts=parts, schedule="adversarial")


@pytest.mark.parametrize("programs", [1, 2, 7, 40])
def test_any_grid_gives_the_same(programs):
    run_and_check(CROSS, programs=programs, schedule="random", seed=programs)


@pytest.mark.parametrize("case", named([RAGGED, CROSS, FEW[4]], FEW[4:5]))
def test_a_sequence_of_nan_stays_alone(case):
    """What a box reads past the end of a sequence is its neighbour; zeros must take its place before P·V."""
    x = case.build()
    plain, lse, _ = run(x)
    b = 4  # the longest: its neighbours are cut in the middle of a tile
    if case.kind == "ragged":
        keys = (x.sequence.cu_q if x.sequence.cu_k is None else x.sequence.cu_k).tolist()
        rows = x.sequence.cu_q.tolist()
        x.k[keys[b] : keys[b + 1]], x.v[keys[b] : keys[b + 1]] = torch.nan, torch.nan
        others = torch.ones(len(x.q), dtype=torch.bool)
        others[rows[b] : rows[b + 1]] = False
    else:
        mine = x.sequence.block_table[b, : -(-case.lens_k[b] // case.page_size)].long()
        x.k[mine], x.v[mine] = torch.nan, torch.nan
        others = torch.arange(case.batch) != b
    out, _, reports = run(x)
    assert not findings(reports)
    assert torch.equal(out[others], plain[others]) and out[~others].isnan().any()
    assert not lse.isnan().any()


@pytest.mark.parametrize("page_size", drawn([3, 16], [3]))
def test_pages_outside_of_the_cache_are_clamped(page_size):
    """With checks off a bad table gives a wrong result, and reads nothing but the cache."""
    x = replace(PAGED, page_size=page_size).build()
    for pages in (x.k, x.v):
        pages.nan_to_num_()
    ready = ready_for(x)
    x.sequence.block_table[0, :2] = torch.tensor([-5, 2**30], dtype=torch.int32)
    out, _, reports = run(x, ready=ready)
    assert not findings(reports)
    assert not out.isnan().any()


@pytest.mark.parametrize("page_size", drawn([3, 16], [3]))
def test_heads_before_rows_in_the_pages(page_size):
    """HND: a page's stride is no multiple of what a row's stride counts, but of their common divisor."""
    x = replace(PAGED, page_size=page_size, heads_q=4, heads_kv=2).build()
    swapped = [pages.transpose(1, 2).contiguous().transpose(1, 2) for pages in (x.k, x.v)]
    sequence = replace(x.sequence, k_pages=swapped[0], v_pages=swapped[1])
    x = replace(x, k=swapped[0], v=swapped[1], sequence=sequence)
    out, lse, reports = run(x)
    assert not findings(reports)
    check(x, out, lse)


def test_no_sequence_has_a_row():
    """All tiles are gone: every program finds an empty list and ends."""
    x = replace(CROSS, lens_q=(0, 0, 5, 0, 0), lens_k=(3, 0, 4, 1, 0)).build()
    out, lse, reports = run(x)
    assert not findings(reports)
    check(x, out, lse)


lengths = st.lists(st.tuples(st.sampled_from((0, 1, 5, 63, 64, 65, 130)), st.integers(0, 140)), min_size=1, max_size=5)


def check_ragged(pairs, mask, seed):
    lens_q, lens_k = zip(*pairs, strict=True)
    if sum(lens_q) == 0 or sum(lens_k) == 0:
        return
    case = replace(CROSS, batch=len(pairs), lens_q=lens_q, lens_k=lens_k, mask=mask)
    run_and_check(case, schedule="random", seed=seed)


def check_pages(pairs, page_size, mask, seed):
    lens_k = tuple(length for _, length in pairs)
    if sum(lens_k) == 0:
        return
    case = replace(PAGED, batch=len(pairs), seq_q=17, lens_k=lens_k, page_size=page_size, mask=mask)
    run_and_check(case, schedule="random", seed=seed)


SEEDS = st.integers(0, 2**16)
test_random_ragged_shapes = pytest.mark.full(
    settings(max_examples=25)(given(lengths, st.sampled_from(("causal", "full", "window")), SEEDS)(check_ragged))
)
test_random_pages = pytest.mark.full(
    settings(max_examples=8)(
        given(lengths, st.sampled_from((3, 16, 64)), st.sampled_from(("causal", "full")), SEEDS)(check_pages)
    )
)


@pytest.mark.parametrize(
    "case",
    named([
        replace(CROSS, heads_q=7, sinks=True, score="alibi"),
        replace(RAGGED, heads_q=10, heads_kv=2, dim=80, mask="window"),
        replace(PAGED, page_size=16, heads_q=3, dim=128, mask="full"),
    ]),
)  # fmt: skip
def test_heads_that_do_not_fill_the_rows_of_a_tile(case, monkeypatch):
    monkeypatch.setattr(choice, "UNFILLED", 0.2)
    assert in_parts(ready_for(case.build()), 1).config.tiles.packed == case.heads_q // case.heads_kv
    run_and_check(case, schedule="random", seed=1)
    x = case.build()
    out, lse, reports = run(x, parts=3)
    assert not findings(reports)
    check(x, out, lse)
