"""Ragged queries over a paged cache on Hopper, in the simulator: decode and prefill each leave out the other's
sequences, and together leave none out."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from tests.drawn import drawn, in_turn
from tests.oracle import Inputs, check
from tests.paged_steps import Step, tensors
from tests.sim.sm90.lengths import MARGIN, findings, kernel
from warpattn.kernels.sm90.decode.config import LengthSums, with_fields
from warpattn.kernels.sm90.paged_ragged import choose, few_tokens, list_launches
from warpattn.masks import Causal, CustomMask, Full, SlidingWindow
from warpattn.masks.base import InOrder
from warpattn.problem import Call, CheckedCall, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.launch import PlanOptions
from warpattn.problem.operands import Operands, fitted
from warpattn.scores import ALiBi, SoftCap
from warpattn.sequences import PagedRagged, Ragged
from warpattn.sim import simulate
from warpattn.sim.ops import hopper
from warpattn.sim.simulate import linked

CAUSAL = Causal()
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.05])
MIXED = ((1, 70, 0, 3, 1, 0), (40, 90, 5, 100, 260, 0))  # queries, keys
ONE_EACH = ((1, 1, 1, 1), (300, 7, 0, 64))
BY_BATCH = Causal() & CustomMask(lambda b, h, q, k: (k + b + h) % 3 != 0)
APART = (("combine.separate_kernel", True),)
BLOCKS = (("schedule.sums", LengthSums(once=False)),)


def ready_for(x: Inputs, has_lse: bool = True) -> CheckedCall:
    """The checked call as on a card, where no offset is read back."""
    call = Call(x.q, x.k, x.v, x.sequence, x.mask, x.score, x.sinks, None, has_lse, None, "simulate:sm90")
    return validate(call, read_values=False)


def run(step: Step, x: Inputs, programs: int = 4, has_lse: bool = True, **options):
    """(out, lse or None, names of launches, findings); outputs are between margins, which must stay as they are."""
    ready = ready_for(x, has_lse)
    around = torch.full((len(x.q) + 2 * MARGIN, step.heads, step.dim), torch.nan, dtype=x.q.dtype)
    lse = torch.full((step.heads, len(x.q)), torch.nan) if has_lse else None
    out = around[MARGIN:-MARGIN]
    operands = fitted(Operands(x.q, x.k, x.v, out, lse, x.sinks))
    choice = choose(ready.problem, ARCHS["sm90"], PlanOptions(batch_invariant=step.invariant, decoded=step.decoded))
    if few := choice.config.few:
        few = replace(few, config=with_fields(few.config, dict(step.config)))
        choice = replace(choice, config=replace(choice.config, few=few))
    found, names = [], []
    for launch in list_launches(ready, operands, x.sequence, choice):
        grid = (min(launch.grid[0], max(programs, launch.persistent)),) if launch.persistent else launch.grid
        found.append(simulate(kernel(launch), grid, launch.args, **options))
        names.append(launch.name)
    assert around[:MARGIN].isnan().all() and around[-MARGIN:].isnan().all(), "neighbours are left alone"
    return out, lse, names, findings(found)


CASES = {
    "mixed": Step(*MIXED),
    "one-each": Step(*ONE_EACH, max_q=1),
    "few": Step((3, 0, 1, 4), (40, 9, 300, 4), max_q=4),
    "longest-first": Step((70, 1, 1), (70, 300, 5)),
    "prompts-alone": Step((40, 0, 20), (40, 7, 90)),
    "nothing-for-some": Step((0, 0, 1, 0), (5, 0, 200, 9), max_q=1),
    "grouped-by-8": Step((1, 30, 2), (200, 30, 40), heads=16),
    "not-grouped": Step((16, 17, 1), (16, 50, 90), heads=2, max_q=40),
    "whole-tile-of-rows": Step((16, 3, 0, 1), (90, 3, 8, 40), heads=8, max_q=16),
    "row-tiles-of-a-token": Step((1, 2, 0, 2), (90, 30, 8, 140), heads=128, heads_kv=1, max_q=2),
    "two-row-tiles": Step((16, 1, 0, 9), (90, 30, 8, 40), heads=16, max_q=16),
    "d128": Step((1, 40, 2), (260, 90, 30), dim=128, mask=Full()),
    "odd-dim": Step((1, 20, 2), (60, 50, 30), dim=40, dtype=torch.float16),
    "pages-of-3": Step((1, 20, 2), (60, 50, 30), page=3),
    "window-sinks": Step(*MIXED, mask=SlidingWindow(50), sinks=True),
    "window-of-long-prompts": Step((1, 200), (5, 330), max_q=4096, mask=SlidingWindow(100)),
    "soft-cap": Step(*MIXED, score=SoftCap(3.0)),
    "alibi": Step(*MIXED, score=ALiBi(SLOPES)),
    "by-batch": Step(*MIXED, mask=BY_BATCH),
    "combined-apart": Step((1, 0, 3, 2, 40), (400, 7, 90, 300, 40), sinks=True, config=APART),
    "in-blocks": Step((1, 0, 3, 2, 40), (400, 7, 90, 300, 40), config=BLOCKS),
    "invariant": Step((1, 0, 3, 2, 40), (400, 7, 90, 300, 40), invariant=True),
    "pages-of-3-odd-dim": Step((1, 20, 2), (60, 50, 30), page=3, dim=40, dtype=torch.float16),
    "by-batch-soft-cap": Step(*MIXED, mask=BY_BATCH, score=SoftCap(3.0)),
    "drafts": Step((4, 70, 0, 3, 5, 1), (300, 90, 5, 100, 260, 70), decoded=4),
    "invariant-few": Step((1, 0, 3, 2), (400, 7, 90, 300), max_q=3, invariant=True, sinks=True),
}


# Every kind of batch, mask, score and combination, and both kernels alone; the rest have other heads and lengths.
DRAWN = (
    "mixed", "one-each", "few", "nothing-for-some", "whole-tile-of-rows", "invariant-few", "row-tiles-of-a-token",
    "drafts",
)  # fmt: skip


@pytest.mark.parametrize(("name", "schedule"), in_turn(CASES, DRAWN, [("eager",), ("adversarial",)], each=1))
def test_right_and_without_findings(name, schedule):
    step, x = CASES[name], tensors(CASES[name])
    out, lse, names, found = run(step, x, schedule=schedule)
    assert not found
    check(x, out, lse)
    few = 0 if step.invariant else few_tokens(ready_for(x).problem, PlanOptions(decoded=step.decoded))
    assert ("sm90.prefill_varlen" in names) == (step.max_q is None or step.max_q > few), "a bound saves launches"


@pytest.mark.parametrize("name", drawn(["mixed", "combined-apart"], ["mixed"]))
def test_the_same_bits_whatever_the_number_of_ctas_finds(name):
    """Sequences that other CTAs skip change nothing: every number of CTAs is right."""
    x = tensors(CASES[name])
    for programs in (1, 3, 7):
        out, lse, _, found = run(CASES[name], x, programs, schedule="random", seed=programs)
        assert not found
        check(x, out, lse)


@pytest.fixture
def sums_in_one_order(monkeypatch):
    """A product's sums, as on the card; numpy's depend on where in a matrix a row is."""
    monkeypatch.setattr(hopper, "multiplier", lambda *types: partial(np.einsum, "mk,kn->mn", optimize=False))
    linked.cache_clear()
    yield
    linked.cache_clear()


def shares(x: Inputs, count: int, longest: int) -> Inputs:
    """The last `count` queries of the first sequence of `x`, whose every key is new, without the other sequences."""
    cu_q = torch.tensor([0, count], dtype=torch.int32)
    kv = x.sequence.kv
    alone = replace(kv, block_table=kv.block_table[:1], lengths=kv.lengths[:1])
    length = int(kv.lengths[0])
    return replace(x, q=x.q[length - count : length], sequence=PagedRagged(alone, Ragged(cu_q, max_q=longest)))


BITS = {
    "causal": Step((150, 1, 70), (150, 260, 90)),
    "window": Step((640, 1), (640, 260), mask=SlidingWindow(300), sinks=True),
    "d128": Step((290, 1), (290, 9), dim=128, heads=8),
    "narrow-window": Step((200, 1), (200, 9), dim=128, mask=SlidingWindow(20)),
    "soft-cap": Step((150, 1, 70), (150, 260, 90), score=SoftCap(30.0)),
    "alibi": Step((150, 3), (150, 30), score=ALiBi(200 * SLOPES)),
}


@pytest.mark.full
@pytest.mark.parametrize("has_lse", [True, False])
@pytest.mark.parametrize("name", drawn(BITS, ["narrow-window"]))
def test_a_token_has_the_same_bits_in_every_step(name, has_lse, sums_in_one_order):
    """A prompt in one step beside others, its end in a later one, and its last token by itself: scores are so large
    that the references of some of a warp's rows move."""
    step = replace(BITS[name], invariant=True, mask=InOrder(BITS[name].mask))
    x = tensors(step)
    x = replace(x, q=x.q * 6)
    whole, lse, _, found = run(step, x, has_lse=has_lse, schedule="eager")
    assert not found
    check(x, whole, lse)
    length = step.queries[0]
    for count, longest in ((length - 37, 4096), (5, 5), (1, 1)):
        part, part_lse, _, found = run(step, shares(x, count, longest), has_lse=has_lse, schedule="eager")
        assert not found
        assert torch.equal(part, whole[length - count : length])
        assert part_lse is None or torch.equal(part_lse, lse[:, length - count : length])


def test_rows_after_the_last_sequence_are_not_written():
    step = Step((1, 30, 2), (200, 30, 40))
    padded = tensors(step, padding=5)
    out, lse, _, found = run(step, padded, schedule="adversarial")
    assert not found and out[33:].isnan().all() and lse[:, 33:].isnan().all()
    x = replace(padded, q=padded.q[:33])
    check(x, out[:33], lse[:, :33])


def test_many_sequences():
    """More than one block of row tiles, runs without queries among them; lengths that differ."""
    queries = tuple(0 if 20 <= b < 150 or b % 7 == 3 else 1 for b in range(160))
    keys = tuple((b * 37) % 23 for b in range(160))
    step = Step(queries, keys, heads=2, heads_kv=1, max_q=1, config=(("schedule.sums", LengthSums(once=False)),))
    x = tensors(step)
    out, lse, _, found = run(step, x, 3, schedule="eager")
    assert not found
    check(x, out, lse)


@pytest.mark.parametrize("programs", [3, 8])
def test_equal_sequences_beside_empty_ones_are_cut_evenly(programs):
    """As if those without queries were not there, which padding of a captured batch is."""
    step = Step((1, 0, 1, 0, 0, 0), (300, 0, 300, 0, 0, 0), max_q=1)
    x = tensors(step)
    out, lse, _, found = run(step, x, programs, schedule="adversarial")
    assert not found
    check(x, out, lse)


def test_a_prompt_beside_one_request():
    """CTAs prefetch before lengths are known: then the prompt's row tile, which decode leaves to prefill, has no units.
    As a call, in which there are more CTAs than units."""
    step = Step((70, 1), (100, 5), heads=8)
    x = tensors(step)
    tail = {"mask": x.mask, "return_lse": True, "backend": "simulate:sm90"}
    out, lse = wa.attention_paged(x.q, x.sequence.kv, Ragged(x.sequence.cu_q), **tail)
    check(x, out, lse)
