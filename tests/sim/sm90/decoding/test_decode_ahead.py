"""Launches of the Hopper decode kernel with PDL, in the simulator: what they read before the preceding kernel ends,
what they prefetch, and when they trigger the dependent launch."""

from dataclasses import replace
from itertools import product

import pytest
import torch

pytest.importorskip("triton")

from tests.drawn import drawn, in_turn
from tests.sim.sm90.decode import Decode, check, of_shape, run, tensors
from warpattn.kernels.sm90.decode.choice import choose
from warpattn.masks import Causal, Padding, SlidingWindow
from warpattn.problem import Call, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.launch import PlanOptions
from warpattn.sequences import Dense, PagedKV
from warpattn.sim.machine.agents import Queue
from warpattn.sim.machine.registry import ACTING, TABLE
from warpattn.sim.ops import asm
from warpattn.sim.simulate import linked

# rows, page, tokens, kv_ready
KERNELS = list(product((1, 9), (0, 3, 16, 64), (1, 3), (False, True)))
DRAWN = [(1, 0, 1, False), (1, 16, 3, True)]


@pytest.mark.parametrize(("kernel", "schedule"), in_turn(KERNELS, DRAWN, [("lazy",), ("random",)], each=1), ids=str)
def test_what_the_preceding_launch_may_write(kernel, schedule):
    """Everything: lengths and table as they are before it ends only say what to prefetch. If keys are ready before the
    dependency: queries, results, and new tokens, which the launch does not touch before; see `preceding_writes`."""
    rows, page, tokens, kv_ready = kernel
    lengths = (150, 1, 64, 129) if page else (190, 190)
    mask = Causal() if page else SlidingWindow(100)
    case = Decode(lengths, page=page, tokens=tokens, heads=rows, behind=True, kv_ready=kv_ready, mask=mask)
    for seed in range(3):
        check(case, 3, schedule=schedule, seed=seed)


@pytest.mark.parametrize("page", drawn([0, 16], [16]))
def test_new_tokens_come_last(page, monkeypatch):
    """Of 16 tiles, the last one has the new token: all others are copied before the producer waits for it."""
    events = {}

    def noting(event, kind, build):
        def of(op):
            act = build(op)

            def noted(role, *operands):
                events.setdefault(role.name, []).append(event)
                return act(role, *operands)

            return noted

        return kind, of

    copying, waiting = "ttng.async_tma_copy_global_to_local", "tt.grid_dependency_wait"
    for name, event in ((copying, "copy"), (waiting, "wait")):
        monkeypatch.setitem(TABLE, name, noting(event, *TABLE[name]))
    linked.cache_clear()
    run(Decode((1000,), page=page, dim=128, kv_ready=True, config=(("overlap.trigger_fraction", 99),)), 1)
    linked.cache_clear()
    (producer,) = (found for found in events.values() if "copy" in found)
    copies = 2 * (4 if page else 1)
    assert producer.index("wait") == 15 * copies and producer.count("copy") == 16 * copies


@pytest.mark.parametrize("page", drawn([0, 64], [64]))
@pytest.mark.parametrize("kv_ready", [False, True])
def test_a_dependent_launch_that_does_not_wait_is_found(kv_ready, page):
    """Every wait for the preceding launch is needed, but for the one that the next launch relies on. A producer that
    reaches new tokens with a full ring has waited with the others already, so keys are few here."""
    case = Decode((40, 40), page=page, kv_ready=kv_ready, behind=True)
    assert run(case, 2).report.clean
    waits = []

    def without(number):
        def change(kernel):
            lines = kernel.asm["ttgir"].splitlines()
            found = [i for i, line in enumerate(lines) if "tt.grid_dependency_wait" in line]
            waits.append(len(found))
            del lines[found[number]]
            return replace(kernel, asm={"ttgir": "\n".join(lines)})

        return change

    for number in range(2 if kv_ready else 1):
        report = run(case, 2, kernel=without(number)).report
        assert report.of_kind("Race") and "the preceding launch" in str(report.of_kind("Race")[0])
    assert set(waits) == {3 if kv_ready else 1}


@pytest.mark.parametrize("page", drawn([0, 16, 64], [16]))
def test_what_is_prefetched_is_read_first(page, monkeypatch):
    """A CTA prefetches the keys of its first tiles: the last ones of the sequence, of both halves of the columns."""
    (text,) = (text for text in asm._ELEMENTWISE if "prefetch" in text)
    asked = set()

    def spy(tensor, wanted, *coord):
        asked.update(zip(*(x[wanted != 0].tolist() for x in coord), strict=True))
        return wanted * 0

    monkeypatch.setitem(asm._ELEMENTWISE, text, spy)
    case, tiles = Decode((1000,), page=page, dim=128), 3
    linked.cache_clear()
    run(replace(case, config=(("overlap.prefetch_tiles", tiles),)), 1)
    linked.cache_clear()
    *_, sequence, _ = tensors(case)
    step, config = page or 64, of_shape(1, 1000)
    rows = range((1000 // config.block_n - tiles + 1) * config.block_n, 1000, step)
    places = [(int(sequence.block_table[0, row // page]), 0) if page else (0, row) for row in rows]
    assert config.block_n == 64 and asked == {(*place, 0, col) for place in places for col in (0, 64)}


def test_no_speculation_where_the_span_needs_tensors():
    """They may be written by the preceding launch like everything else, and are read in many places."""

    def config(mask):
        q, k = torch.zeros(2, 1, 4, 128).bfloat16(), torch.zeros(2, 600, 4, 128).bfloat16()
        return choose(validate(Call(q, k, k, Dense(), mask, backend="reference")).problem, ARCHS["sm90"]).config

    assert (
        config(Causal()).overlap.prefetch_tiles and not config(Padding(torch.tensor([600, 3]))).overlap.prefetch_tiles
    )


@pytest.mark.parametrize(
    ("batch", "keys", "chosen"),
    [(1, 16384, (64, 1, True)), (8, 8192, (64, 4, True)), (1, 131072, (64, 4, True)), (32, 4096, (64, 4, True)),
     (32, 16384, (128, 2, False)), (8, 600, (64, 1, True))],
)  # fmt: skip
def test_when_launches_overlap(batch, keys, chosen):
    """(keys of a tile, tiles prefetched, whether a CTA triggers the next launch early) by the bytes of a CTA."""
    config = of_shape(batch, keys)
    share = batch * 8 * keys // (config.block_n * 128)
    assert (
        config.overlap.pdl
        and (config.block_n, config.overlap.prefetch_tiles, share <= config.overlap.trigger_max_units) == chosen
    )


def test_one_kernel_prefetches_any_number_of_tiles():
    """The number is an argument: steps of few and of many requests run the same code."""
    config = of_shape(8, 8192)
    none, one, four = (replace(config, overlap=replace(config.overlap, prefetch_tiles=n)).compiled for n in (0, 1, 4))
    assert none != one == four


@pytest.mark.parametrize(("batch", "keys", "asked"), [(1, 16384, 0), (8, 8192, 0), (1, 131072, 3), (32, 16384, 3)])
def test_keys_that_are_ready_fill_a_deep_ring(batch, keys, asked):
    """Of short tiles, whatever a CTA's bytes; where its range is longer than the ring it prefetches `asked` more."""
    config = of_shape(batch, keys, PlanOptions(kv_ready_before_dependency=True))
    assert config.overlap.kv_ready_before_dependency and config.overlap.prefetch_tiles == asked
    assert (config.block_n, config.stages, config.overlap.max_inflight_stages, config.overlap.trigger_fraction) == (
        64,
        6,
        2,
        4,
    )


@pytest.mark.parametrize(
    ("group", "tokens", "dim", "page", "chosen"),
    [(4, 1, 128, 0, (64, 6, 2, False)), (4, 1, 128, 16, (64, 6, 2, True)), (16, 4, 128, 16, (128, 2, None, False)),
     (4, 1, 256, 16, (64, 3, 2, True)), (4, 1, 64, 16, (64, 6, 2, True)), (4, 1, 128, 3, (64, 4, None, False))],
)  # fmt: skip
def test_rings_of_keys_that_are_ready(group, tokens, dim, page, chosen):
    """(keys of a tile, slots, of them in flight, whether any range triggers the next launch early): deep with swap-AB,
    and as without the promise with 64 rows, or where ordinary copies gather rows."""
    q, keys = torch.zeros(2, tokens, 2 * group, dim).bfloat16(), (1024, page, 2, dim) if page else (2, 65536, 2, dim)
    table, lengths = torch.zeros(2, 65536, dtype=torch.int32), torch.full((2,), 1024, dtype=torch.int32)
    k = torch.zeros(1, dtype=torch.bfloat16).expand(keys)
    sequence = PagedKV(k, k, table, lengths) if page else Dense()
    problem = validate(Call(q, k, k, sequence, Causal(), backend="reference"), read_values=False).problem
    config = choose(problem, ARCHS["sm90"], options=PlanOptions(kv_ready_before_dependency=True)).config
    assert (
        config.block_n,
        config.stages,
        config.overlap.max_inflight_stages,
        config.overlap.trigger_max_units > 1 << 20,
    ) == chosen


THROTTLES = [(inflight, most, page) for inflight, most in ((None, 6), (1, 1), (2, 2), (5, 5)) for page in (0, 16)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("inflight", "most", "page"), drawn(THROTTLES, [(None, 6, 16)])
)
def test_reads_before_the_dependency_are_throttled(inflight, most, page, monkeypatch):
    """Where copies arrive as late as they may, so many tiles of K, and of V, are in flight at a time."""
    seen = []

    def add(queue, agent):
        issue(queue, agent)
        seen.append(sum(other.engine == "TMA load" and not other.done for other in queue.pending))

    issue = Queue.add
    monkeypatch.setattr(Queue, "add", add)
    fields = (("stages", 6), ("overlap.max_inflight_stages", inflight))
    case = Decode((1000,), page=page, dim=128, kv_ready=True, config=fields)
    check(case, 1, schedule="lazy")
    assert max(seen) == 2 * most * (4 if page else 1)


LEFT = [
    ((4200,), 0, 1, 99, [2]), ((4200,), 16, 1, 99, [2]), ((4200,), 3, 1, 99, [2]), ((4200,), 0, 2, 99, [1, 1]),
    ((1000,), 64, 1, 99, [0]), ((700, 3500, 130), 16, 1, 99, [2]), ((3500, 70), 16, 1, 99, [1]),
    ((700, 0), 16, 1, 99, [0]), ((4200,), 0, 1, 60, []),
]  # fmt: skip


@pytest.mark.parametrize(
    ("lengths", "page", "programs", "most", "left"), drawn(LEFT, [case for case in LEFT if case[1] == 16])
)
def test_when_a_cta_triggers_the_next_launch(lengths, page, programs, most, left, monkeypatch):
    """Once, with a 32nd of its tiles left to copy, but in its last item; or by ending, if its range has more units than
    the configuration says."""
    case = Decode(lengths, page=page, config=(("block_n", 64), ("overlap.trigger_max_units", most)))
    assert left_behind(case, programs, monkeypatch) == left


@pytest.mark.parametrize(("keys", "left"), [(4200, 16), (1400, 5), (500, 2), (400, 1), (384, 0), (64, 0)])
def test_with_keys_that_are_ready_it_triggers_earlier(keys, left, monkeypatch):
    """With a 4th left, but not before its ring of 6 slots is full: it has to wait for the preceding launch by then."""
    assert left_behind(Decode((keys,), dim=128, kv_ready=True), 1, monkeypatch) == [left]


def left_behind(case, programs, monkeypatch):
    """For each CTA that triggers the next launch before it ends, the tiles that it copies afterwards."""
    here, copies = {}, "ttng.async_tma_copy_global_to_local" if case.page != 3 else "ttg.async_commit_group"
    kind, build = TABLE[copies]

    def copying(op):
        copy = build(op)

        def run(role, *operands):
            here.setdefault(role.program.index[0], []).append("copy")
            return copy(role, *operands)

        return run

    def triggering(op):
        return lambda role: here.setdefault(role.program.index[0], []).append("trigger")

    monkeypatch.setitem(TABLE, copies, (kind, copying))
    monkeypatch.setitem(TABLE, "tt.grid_dependency_launch_dependents", (ACTING, triggering))
    linked.cache_clear()
    run(case, programs)
    linked.cache_clear()
    assert all(events.count("trigger") <= 1 for events in here.values())
    copies_of_tile = 2 * (4 if case.page == 16 else 1)
    behind = [len(events) - 1 - events.index("trigger") for events in here.values() if "trigger" in events]
    assert all(copied % copies_of_tile == 0 for copied in behind)
    return [copied // copies_of_tile for copied in behind]
