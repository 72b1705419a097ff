"""The Hopper decode kernel in the simulator: right values, no findings, the same bits whichever CTA combines."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from tests.drawn import drawn, each_once, in_turn
from tests.sim.sm90.decode import Decode, check, of_shape, run, tensors
from warpattn.kernels.sm90.decode.choice import choose, choose_tiles, even_cut, short_parts
from warpattn.kernels.sm90.decode.config import LengthSums
from warpattn.masks import Causal, Chunked, CustomMask, SlidingWindow
from warpattn.problem import Call, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.element import BF16
from warpattn.problem.launch import PlanOptions
from warpattn.scores import ALiBi, SoftCap
from warpattn.sequences import Dense
from warpattn.sim.compile import Compiled

SCHEDULES = [("eager", 0), ("lazy", 0), ("adversarial", 0), *(("random", seed) for seed in range(3))]
LENGTHS = (1, 2, 63, 64, 65, 127, 129, 1000)
MIXED = (130, 0, 64, 5, 300)
SLOPES = ALiBi(torch.tensor([0.5, 0.25, 0.1, 0.05]))
APART = (("combine.separate_kernel", True),)
BLOCKS = (("schedule.sums", LengthSums(once=False)),)
UNITS_OF_2 = (("schedule.unit", 2),)

CASES = {
    "dense": Decode((300, 300), heads=8, heads_kv=2),
    "dense-128": Decode((300,), heads=8, heads_kv=2, dim=128, tokens=2, mask=Causal()),
    "head-dim-256": Decode((200,), dim=256, tokens=2, mask=Causal()),
    "odd-dims": Decode((200, 70), dim=72, dim_v=40, page=16),
    "fp16": Decode(MIXED, page=64, dtype=torch.float16),
    "paged": Decode(LENGTHS, page=64, heads=8, heads_kv=2),
    "paged-gathered": Decode(MIXED, page=3, tokens=2, mask=Causal()),
    "window": Decode(MIXED, page=16, tokens=4, mask=SlidingWindow(70)),
    "chunked": Decode(MIXED, page=16, tokens=4, mask=Chunked(48) & Causal()),
    "two-row-tiles": Decode((200, 3, 90), page=32, heads=8, tokens=16, mask=Causal()),
    "window-two-row-tiles": Decode((300, 3, 90), page=32, heads=8, tokens=16, mask=SlidingWindow(40)),
    "five-row-tiles": Decode((300, 3, 90), page=32, heads=20, tokens=16, mask=Causal()),
    "head-dim-512-two-row-tiles": Decode((300, 70), dim=512, page=64, heads=8, tokens=4, mask=Causal()),
    "combined-apart": Decode(
        (1000, 0, 129), page=64, heads=6, heads_kv=2, tokens=7, sinks=True, mask=Causal(), config=APART
    ),
    "combined-apart-dense": Decode((700, 700), heads=6, heads_kv=1, tokens=3, config=APART),
    "soft-cap": Decode(MIXED, page=64, score=SoftCap(3.0)),
    "alibi": Decode(MIXED, page=64, tokens=2, mask=Causal(), score=SLOPES),
    "sinks": Decode(MIXED, page=64, sinks=True),
    "sinks-alibi-window": Decode((300, 40), tokens=2, page=8, mask=SlidingWindow(90), score=SLOPES, sinks=True),
    "by-head": Decode((200,), tokens=2, mask=CustomMask(lambda b, h, q, k: (k + h) % 3 != 0)),
    "fp16-soft-cap": Decode(MIXED, page=64, dtype=torch.float16, score=SoftCap(3.0)),
    "invariant": Decode((400, 70, 130), page=64, heads=8, heads_kv=2, invariant=True, config=(("schedule.unit", 1),)),
}
# Every kind of mask and score, form of pages and of combination occurs in one of these, in a test below, or in
# test_decode_few.py.
DRAWN = ("paged-gathered", "combined-apart", "sinks-alibi-window")


@pytest.mark.parametrize(("name", "schedule", "seed"), in_turn(CASES, DRAWN, SCHEDULES))
def test_right_and_without_findings(name, schedule, seed):
    check(CASES[name], programs=5, schedule=schedule, seed=seed)


@pytest.mark.parametrize("length", LENGTHS)
def test_dense_lengths(length):
    check(Decode((length, length)), programs=4)


GROUPS = list(product((1, 4, 8), (1, 2, 4, 16)))


@pytest.mark.full
@pytest.mark.parametrize(("group", "tokens"), drawn(GROUPS, [(1, 16)]))
def test_groups_and_tokens(group, tokens):
    check(Decode(MIXED, page=64, heads=2 * group, heads_kv=2, tokens=tokens, mask=Causal()), programs=4)


MASKS, PAGES = (None, Causal(), SlidingWindow(70), Chunked(48)), (1, 3, 16, 48, 64, 128, 256)


# Of several boxes; gathered ones, one tile, and pages of 16 are in other tests.
KEPT_PAGES = [(mask, page) for mask, page in each_once(MASKS, PAGES) if page == 48]


@pytest.mark.full
@pytest.mark.parametrize(("mask", "page"), drawn(product(MASKS, PAGES), KEPT_PAGES), ids=str)
def test_pages(page, mask):
    check(Decode(MIXED, page=page, tokens=2, mask=mask), programs=4)


@pytest.mark.parametrize("programs", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("invariant", drawn([False, True], [False]))
def test_any_number_of_programs(programs, invariant):
    """One CTA splits nothing; with more CTAs than key tiles some have nothing to do."""
    case = Decode((1000, 130), page=64, invariant=invariant, config=(("schedule.unit", 2),))
    check(case, programs, schedule="random", seed=programs)


def test_few_programs_of_many_row_tiles():
    """128 CTAs have four queues of 33 row tiles, two have two of 66, three one of 132."""
    case = Decode((3,) * 33, heads=256, dim=8, replanned=True)
    check(case, 3)


OVERHEADS = list(product((0, 1, 2, 5), (1, 2, 5, 9, 16, 40)))


@pytest.mark.full
@pytest.mark.parametrize(("overhead", "programs"), drawn(OVERHEADS, [(2, 5)]))
def test_any_overhead_of_a_head(overhead, programs):
    """Ranges that begin, end or lie in the overhead after a head."""
    fields = (("schedule.unit", 1), ("schedule.head_overhead", overhead))
    case = Decode((1000, 3, 0, 130, 64, 1), page=64, heads_kv=2, config=fields)
    check(case, programs, schedule="random", seed=programs)
    check(replace(case, tokens=2, mask=Causal(), config=(*case.config, *APART)), programs)


# Programs and parts for four heads of 16 key tiles each.
CUTS = [(1, 0), (2, 0), (4, 0), (5, 0), (7, 0), (8, 8), (11, 8), (12, 12), (16, 16), (40, 32)]


@pytest.mark.parametrize(
    ("page", "programs", "parts"),
    drawn([(page, *cut) for page in (0, 64) for cut in CUTS], [(64, *cut) for cut in CUTS[1::3]]),
)
def test_equally_long_heads_are_cut_evenly(page, programs, parts):
    """Whole heads, or equal parts of them, even if some CTAs have nothing to do; three parts of 16 tiles leave
    units without keys after the last."""
    narrow = (("block_n", 64),)
    case = Decode((1000, 1024) if page else (1024, 1024), page=page, heads_kv=2, config=narrow)
    assert check(case, programs, schedule="random", seed=programs).parts == parts
    check(replace(case, tokens=2, mask=Causal(), config=narrow + APART), programs)


@pytest.mark.full
def test_cut_evenly_only_where_no_range_grows_much():
    """Four heads of 12 tiles over three CTAs: ranges grow from 16 tiles to 24; with twice as many it would be 16
    more."""
    case = Decode((768,), heads_kv=4, config=(("block_n", 64),))
    assert check(case, 3).parts == 0
    assert check(replace(case, lengths=(1536,)), 3).parts > 0


@pytest.mark.parametrize(
    ("heads", "ctas", "cut"),
    [(8, 132, (16, 1)), (64, 132, (2, 1)), (66, 132, (2, 1)), (67, 132, (1, 1)), (132, 132, (1, 1)),
     (133, 132, (1, 2)), (256, 132, (1, 2)), (1024, 132, (1, 8)), (200, 132, (1, 2))],
)  # fmt: skip
def test_even_cut(heads, ctas, cut):
    assert even_cut(heads, ctas) == cut


@pytest.mark.parametrize("programs", [8, 9, 20])
@pytest.mark.parametrize("few", drawn([0, 8], [8]))
def test_few_and_many_parts(few, programs):
    check(
        Decode((2500,), tokens=2, mask=Causal(), config=(("combine.short_parts", few),)),
        programs,
        schedule="adversarial",
    )


@pytest.mark.full
@pytest.mark.parametrize(("dim", "few"), drawn(product((64, 128, 256), (2, 4, 32)), [(64, 32)]))
def test_parts_that_are_added_up_together(dim, few):
    """As many as the short code takes, one more, and rows in several blocks."""
    few = min(few, 4096 // dim)
    for tokens, programs in ((1, few), (3, few + 1)):
        check(Decode((64 * few + 70,), tokens=tokens, dim=dim, config=(("combine.short_parts", few),)), programs)


@pytest.mark.parametrize(
    ("parts", "dim", "short"), [(1, 128, 2), (2, 128, 2), (3, 64, 4), (16, 128, 16), (17, 256, 16)]
)
def test_short_parts(parts, dim, short):
    assert short_parts(parts, choose_tiles(BF16, dim, dim, rows=4)) == short


def test_only_heads_that_differ_have_an_overhead():
    def overhead(case: Decode) -> int:
        q, (k, v), sequence, _ = tensors(case)
        k, v = (sequence.k_pages, sequence.v_pages) if case.page else (k, v)
        ready = validate(Call(q, k, v, sequence, backend="reference"), read_values=False)
        return choose(
            ready.problem, ARCHS["sm90"], options=PlanOptions(batch_invariant=case.invariant)
        ).config.schedule.head_overhead

    assert overhead(Decode((600, 600), page=64)) > 0
    assert overhead(Decode((600, 600))) == 0
    assert overhead(Decode((600, 600), page=64, invariant=True)) == 0, "parts are units, whatever else is in the batch"


PLAINER = {
    "rows in tiles": ("schedule.one_row_tile", False),
    "lengths at once": ("schedule.sums", LengthSums()),
    "parts in a loop": ("combine.short_parts", 0),
}
FORMS = [(name, page) for name in PLAINER for page in (0, 64)]


@pytest.mark.full
@pytest.mark.parametrize(("form", "schedule", "seed"), in_turn(FORMS, FORMS[4:5], SCHEDULES, each=6), ids=str)
def test_the_plainer_forms(form, schedule, seed):
    name, page = form
    check(Decode((600, 600), page=page, heads_kv=2, config=(PLAINER[name],)), 3, schedule=schedule, seed=seed)


@pytest.mark.full
@pytest.mark.parametrize(
    ("batch", "programs"), drawn(product((3, 5), (3, 4, 5, 6, 11)), [(5, 3), (5, 5), (5, 11)])
)
def test_every_nth_head(batch, programs):
    case = Decode((130,) * batch, heads=8, heads_kv=4, config=(("schedule.interleave_heads", True),))
    ran = check(case, programs, schedule="random")
    plain = check(replace(case, config=()), programs)
    assert torch.equal(ran.out, plain.out), "only the order of heads changes"


@pytest.mark.parametrize(("batch", "spread"), [(32, False), (128, True), (64, True), (67, False)])
def test_when_heads_are_spread(batch, spread):
    q = torch.empty(batch, 1, 32, 128, dtype=torch.bfloat16)
    k = torch.empty(1, 1, 8, 128, dtype=torch.bfloat16).expand(batch, 4096, 8, 128)
    ready = validate(Call(q, k, k, Dense(), backend="reference"), read_values=False)
    choice = choose(ready.problem, ARCHS["sm90"])
    assert (
        choice.config.schedule.interleave_heads == spread
        and any("every n-th head" in why for why in choice.reasons) == spread
    )
    assert any("8 columns for queries" in why for why in choice.reasons)


@pytest.mark.full
@pytest.mark.parametrize(("block_n", "ctas"), drawn(product((64, 128), (1, 2)), [(128, 1)]))
def test_configurations(block_n, ctas):
    fields = (("block_n", block_n), ("stages", 2), ("ctas", ctas), ("schedule.sums.width", 1024))
    check(Decode((300, 130), page=16, config=fields), programs=4)


@pytest.mark.full
@pytest.mark.parametrize(
    "fields",
    [pytest.param((), id="wide", marks=pytest.mark.full), pytest.param(BLOCKS, id="blocks")],
)
def test_more_sequences_than_are_added_up_at_once(fields):
    lengths = tuple((37 * b) % 5 * 30 for b in range(150))
    check(Decode(lengths, page=64, heads=1, config=fields, behind=True), programs=6)


random_batches = given(
    lengths=st.lists(st.integers(0, 400), min_size=1, max_size=7),
    programs=st.integers(1, 12),
    seed=st.integers(0, 1000),
    case=st.sampled_from([
        Decode((1,), page=16, heads=6, heads_kv=2, tokens=2, mask=Causal()),
        Decode((1,), page=64, heads=4, heads_kv=4, mask=SlidingWindow(100)),
        Decode((1,), page=64, heads=6, heads_kv=2, tokens=7, mask=Causal(), config=APART),
        Decode((1,), page=64, heads=4, heads_kv=2, invariant=True, config=(("schedule.unit", 2),)),
    ]),
    kv_ready=st.booleans(),
)  # fmt: skip


def check_batch(lengths, programs, seed, case, kv_ready):
    """After a kernel that may still write everything, so that prefetches are speculative; or all but older keys."""
    case = replace(case, lengths=tuple(lengths), seed=seed, behind=True, kv_ready=kv_ready)
    check(case, programs, schedule="random", seed=seed)


test_random_batches = pytest.mark.full(settings(max_examples=8)(random_batches(check_batch)))


@pytest.mark.parametrize("keys", [257, 129])
def test_an_invariant_batch_of_one_length_stays_in_its_workspace(keys):
    """Five key tiles are three units of two; four CTAs would cut two heads evenly at four units each."""
    check(Decode((keys,), page=64, heads=4, heads_kv=2, invariant=True, config=(("schedule.unit", 2),)), programs=4)


def test_nothing_visible():
    ran = check(Decode((100, 0), page=64, tokens=2, mask=CustomMask(lambda b, h, q, k: k < 0)))
    assert not ran.out.any() and torch.isneginf(ran.lse).all()


def test_no_keys_at_all_but_sinks():
    case = Decode((0, 40), page=16, sinks=True)
    ran = check(case)
    sinks = tensors(case)[3]
    assert sinks is not None and torch.allclose(ran.lse[0, :, 0], sinks)
    assert not ran.out[0].any() and ran.out[1].any()


def test_the_same_bits_under_every_schedule():
    outs = [check(CASES["paged"], 7, schedule=schedule, seed=seed).out for schedule, seed in SCHEDULES]
    assert all(torch.equal(outs[0], out) for out in outs[1:])


@pytest.mark.parametrize("kv_ready", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_batch_invariant_tiles_do_not_depend_on_the_batch(dim, kv_ready):
    def config(batch: int):
        return of_shape(batch, 8192, PlanOptions(batch_invariant=True, kv_ready_before_dependency=kv_ready), dim)

    assert config(1).block_n == config(64).block_n and config(1).schedule.unit == config(64).schedule.unit
    assert of_shape(1, 8192, dim=128).block_n == 64 and of_shape(64, 8192, dim=128).block_n == 128


@pytest.mark.parametrize("kv_ready", drawn([False, True], [True]))
@pytest.mark.parametrize("programs", [1, 4, 9])
def test_batch_invariance(programs, kv_ready):
    """A sequence alone, and with other company on another number of CTAs: the same bits."""
    case = Decode(
        (777,), page=64, heads=8, heads_kv=2, invariant=True, kv_ready=kv_ready, config=(("schedule.unit", 2),)
    )
    alone = check(case, 3)
    q, (k, v), _, _ = tensors(replace(case, page=0))
    many = check(replace(case, lengths=(777, 400, 33)), programs, first=(q, k, v))
    assert torch.equal(alone.out[0], many.out[0]) and torch.equal(alone.lse[0], many.lse[0])


@pytest.mark.parametrize(
    ("heads", "tokens", "batch", "apart"), [((32, 8), 1, 1, False), ((64, 8), 1, 1, False), ((32, 8), 8, 1, True),
                                            ((16, 1), 1, 1, True), ((16, 1), 1, 200, False)])  # fmt: skip
def test_who_adds_up_the_parts(heads, tokens, batch, apart):
    """A second kernel where one CTA would have to read too much for a head: many rows, or many parts."""
    case = Decode((16384,), heads=heads[0], heads_kv=heads[1], tokens=tokens, dim=8)
    q, (k, v), sequence, _ = tensors(case)
    problem = validate(Call(q, k, v, sequence, backend="reference"), read_values=False).problem
    choice = choose(replace(problem, batch=batch), ARCHS["sm90"])
    assert choice.config.combine.separate_kernel is apart
    assert any(("second kernel" if apart else "last CTA") in reason for reason in choice.reasons)


def broken(old: str, new: str):
    """The kernel with its text changed once."""

    def change(kernel: Compiled) -> Compiled:
        text = kernel.asm["ttgir"]
        assert old in text
        return replace(kernel, asm={"ttgir": text.replace(old, new, 1)})

    return change


def test_combining_without_acquire_is_found():
    change = broken("tt.atomic_rmw add, acq_rel", "tt.atomic_rmw add, relaxed")
    ran = run(Decode((1000,)), 4, kernel=change, schedule="random", seed=1)
    assert "Race" in {finding.kind for finding in ran.report.findings}, ran.report


def test_values_past_the_end_that_are_not_cleared_are_nan():
    """The kernel has to clear garbage after the last key: the same case is right with that."""
    case = Decode((70,), page=64)
    check(case)
    ran = run(replace(case, config=(("schedule.has_lengths", False),)), 1)
    assert not ran.out_error < 1


def test_pages_out_of_range_are_clamped():
    ran = run(Decode((200,), page=64), 2, table=torch.tensor([[-5, 10**6, 0, 2]], dtype=torch.int32))
    assert ran.report.clean, ran.report
