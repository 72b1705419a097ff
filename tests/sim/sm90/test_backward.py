"""The project's Hopper backward in the simulator: right gradients and no findings under every schedule."""

from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("triton")

from tests.drawn import drawn
from tests.sim.backward import (
    Case,
    check_right,
    error,
    gradients,
    launches,
    launches_of,
    operands,
    simulated,
    tolerances,
)
from warpattn.language.expr import load
from warpattn.masks import Causal, CustomMask, Document, Mask, Materialized, Padding, Prefix, SlidingWindow
from warpattn.masks.program import Span
from warpattn.problem.backward import fitted_gradients, write_back
from warpattn.runtime.simulate import Options, run_launch
from warpattn.scores import ALiBi, Bias, CustomScore, SoftCap
from warpattn.sim.memory.descriptor import Descriptor
from warpattn.sim.ops import hopper

SCHEDULES = [("eager", 0), ("lazy", 0), ("adversarial", 0), *(("random", seed) for seed in range(3))]
VISIBLE = torch.rand(1, 1, 140, 140, generator=torch.Generator().manual_seed(1)) < 0.7


@dataclass(frozen=True, eq=False)
class Behind(Mask):
    """k <= q - back[h]: each head has a staircase of its own."""

    back: torch.Tensor

    def keep(self, b, h, q, k, lens=None):
        return k <= q - load(self.back, h)

    def kv_span(self, b, h, q_lo, q_hi, lens):
        return Span(0, 0, q_lo + 1 - load(self.back, h), q_hi + 1 - load(self.back, h))


CASES = {
    "full": Case(128, 128),
    "full-128": Case(200, 264, dim=128),
    "causal": Case(200, 264, dim=128, mask=Causal()),
    "claims": Case(200, 400, dim=128, heads=2, heads_kv=2, mask=Causal()),
    "groups": Case(100, 140, heads=4, heads_kv=2, batch=2, mask=Causal()),
    "sections": Case(100, 140, heads=6, heads_kv=3, mask=Causal(), section=2),
    "groups-laps": Case(300, 500, heads=10, heads_kv=2, mask=Causal(), section=1),
    "groups-full": Case(100, 140, heads=6, heads_kv=2),
    "groups-window": Case(300, 300, heads=6, heads_kv=2, mask=SlidingWindow(70) & Causal()),
    "groups-padding": Case(140, 300, heads=4, heads_kv=2, batch=2, mask=Padding(torch.tensor([90, 0])), section=1),
    "groups-more-queries": Case(300, 100, heads=8, mask=Causal()),
    "groups-by-head": Case(
        200, 200, heads=6, heads_kv=2, mask=Behind(torch.tensor([0, 150, 70, 0, 200, 10])), section=1,
        long=True,
    ),
    "groups-score": Case(140, 140, heads=4, heads_kv=2, score=ALiBi(torch.tensor([0.5, 0.1, 0.7, 0.2])), mask=Causal()),
    "groups-ragged": Case(
        0, 0, lengths=((100, 150), (0, 40), (30, 0), (200, 300), (130, 30)), dim=128, heads=6, heads_kv=2,
        mask=Causal(), section=1,
    ),
    "odd-dims": Case(70, 70, dim=72, dim_v=40, dtype=torch.float16),
    "tiny": Case(1, 3, dim=8, mask=Causal()),
    "wide-values": Case(70, 70, dim=40, dim_v=128, mask=Causal()),
    "wide-values-ragged": Case(0, 0, lengths=((30, 50), (70, 70)), dim=64, dim_v=72, deterministic=True),
    "more-queries": Case(300, 100, mask=Causal()),
    "window": Case(300, 300, mask=SlidingWindow(70, 10), long=True),
    "documents": Case(512, 512, mask=Document(torch.arange(512)[None] // 130), long=True),
    "documents-and-causal": Case(300, 300, mask=Document(torch.arange(300)[None] // 90) & Causal()),
    "prefix-or-window": Case(300, 300, mask=Prefix(40) | SlidingWindow(50)),
    "padding": Case(140, 140, batch=2, mask=Padding(torch.tensor([90, 0])), long=True),
    "materialized": Case(140, 140, mask=Materialized(VISIBLE), long=True),
    "holes": Case(200, 200, mask=CustomMask(lambda b, h, q, k: (q + k) % 3 != 0), long=True),
    "nothing-visible": Case(140, 140, mask=CustomMask(lambda b, h, q, k: k < 0)),
    "sinks": Case(140, 140, heads=2, heads_kv=2, batch=2, sinks=True, mask=SlidingWindow(30, 0), long=True),
    "lse": Case(140, 140, dlse=True, sinks=True, mask=Causal()),
    "soft-cap": Case(140, 140, dim=128, score=SoftCap(3.0), mask=Causal(), limit=3.0),
    "alibi": Case(140, 140, heads=2, score=ALiBi(torch.tensor([0.5, 0.1]))),
    "bias": Case(140, 140, score=Bias(torch.randn(1, 1, 140, 140, generator=torch.Generator().manual_seed(2)))),
    "custom-score": Case(140, 140, score=CustomScore(lambda s, b, h, q, k: s * 2 + 0.01 * k), mask=Causal()),
    "negative-scale": Case(140, 140, scale=-0.125),
    "ragged": Case(0, 0, lengths=((100, 100), (0, 0), (30, 30), (200, 200)), heads=2, heads_kv=1, mask=Causal()),
    "ragged-sections": Case(
        0, 0, lengths=((100, 150), (0, 40), (20, 200)), heads=3, heads_kv=3, mask=Causal(), section=2
    ),
    "ragged-cross": Case(
        0, 0, lengths=((100, 150), (0, 40), (30, 0), (20, 200), (130, 30)), dim=128, heads=2, heads_kv=2, mask=Causal(),
        sinks=True, dlse=True,
    ),
    "deterministic": Case(300, 300, mask=Causal(), deterministic=True, heads=2, heads_kv=1),
    "deterministic-groups": Case(
        300, 500, dim=128, mask=Causal(), deterministic=True, heads=4, heads_kv=2, section=2
    ),
    "deterministic-laps": Case(200, 400, heads=3, heads_kv=3, mask=Causal(), deterministic=True, section=2, at_once=3),
    "deterministic-heads": Case(300, 300, mask=Causal(), deterministic=True, heads=2, heads_kv=2),
    "deterministic-groups-ragged": Case(
        0, 0, lengths=((300, 300), (0, 40), (130, 300)), mask=Causal(), deterministic=True, heads=3
    ),
    "deterministic-groups-256": Case(130, 140, dim=256, mask=Causal(), deterministic=True, heads=2),
    "deterministic-full": Case(200, 500, dim=128, deterministic=True),
    "deterministic-two-sums": Case(200, 500, heads=2, deterministic=True, batch=2),
    "deterministic-ragged": Case(
        0, 0, lengths=((300, 300), (0, 40), (130, 300)), mask=SlidingWindow(100, 20), deterministic=True
    ),
    "groups-256": Case(130, 140, dim=256, heads=6, heads_kv=2, mask=Causal(), section=1),
    "dim-256": Case(200, 140, dim=256, heads=2, heads_kv=1, mask=Causal()),
    "dims-192-128": Case(130, 140, dim=192, dim_v=128, score=SoftCap(3.0), limit=3.0),
    "dim-256-first-keys": Case(130, 140, dim=256, mask=CustomMask(lambda b, h, q, k: k < 64)),
    "dims-160-72-ragged": Case(
        0, 0, lengths=((100, 150), (0, 40), (30, 0), (20, 200), (130, 30)), dim=160, dim_v=72, mask=Causal(),
        deterministic=True,
    ),
    "dim-96": Case(140, 140, dim=96, mask=Causal()),
    "dims-80-ragged": Case(0, 0, lengths=((100, 150), (30, 30)), dim=80, dim_v=96, mask=Causal(), deterministic=True),
    "dims-160-256": Case(130, 70, dim=160, dim_v=256),
    "ragged-window": Case(0, 0, lengths=((300, 300), (70, 70)), mask=SlidingWindow(70), score=SoftCap(3.0), limit=3.0),
}
# Every kind of config, mask and score occurs in one of these, or in a test below that runs a case in its own way.
DRAWN = ("lse", "groups-by-head")
# Of 128 keys above head dim 128, whose attending warpgroups add dQ: a case, a schedule, and CTAs (0: one a key tile).
ADDED = {
    "full": (Case(130, 300, dim=192, dim_v=128), "random", 1),
    "groups": (Case(200, 264, dim=192, dim_v=128, heads=2, heads_kv=1, mask=Causal()), "adversarial", 0),
    "deterministic": (Case(200, 500, dim=160, dim_v=72, deterministic=True, dtype=torch.float16), "random", 0),
    "deterministic-causal": (
        Case(200, 300, dim=192, dim_v=128, heads=2, heads_kv=1, deterministic=True, mask=Causal()), "lazy", 0
    ),
    "ragged": (
        Case(0, 0, lengths=((100, 150), (0, 40), (30, 0), (20, 200)), dim=160, dim_v=72, mask=Causal()), "eager", 2
    ),
    "soft-cap": (Case(130, 140, dim=256, dim_v=64, score=SoftCap(3.0), limit=3.0), "lazy", 0),
    "padding": (Case(140, 140, batch=2, dim=192, dim_v=128, mask=Padding(torch.tensor([90, 0]))), "lazy", 1),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", drawn(ADDED, ["groups"]))
def test_attending_warpgroups_add_dq(name):
    case, schedule, programs = ADDED[name]
    (main,) = (launch for launch in launches_of(case) if launch.name == "sm90.backward")
    assert main.key[0].attend_adds and main.key[0].block_n == 128
    check_right(case, schedule=schedule, **({"programs": programs} if programs else {}))


@pytest.mark.parametrize("name", drawn(CASES, DRAWN))
def test_right_and_without_findings(name):
    check_right(CASES[name], schedule="lazy")


TURNS = [("claims", "random"), ("groups", "adversarial"), ("nothing-visible", "lazy"), ("ragged", "random")]


@pytest.mark.parametrize(
    ("name", "schedule"), drawn(TURNS, [("groups", "adversarial")])
)
def test_one_cta_takes_all_key_tiles(name, schedule):
    check_right(CASES[name], schedule=schedule, programs=1)


def walked(case, monkeypatch):
    """(query head, first row) of every query tile that is visited, CTA after CTA; a persistent kernel has one CTA."""
    numbers, landing = {}, hopper._landing

    def noted(role, descriptor, box, target):
        if len(box[0]) == 2:  # the numbers of a tile's rows
            numbers.setdefault(role.program.number, []).append(box[0])
        return landing(role, descriptor, box, target)

    with monkeypatch.context() as patched:
        patched.setattr(hopper, "_landing", noted)
        check_right(case, schedule="eager", programs=1)
    assert all(tiles[::2] == tiles[1::2] for tiles in numbers.values()), "of Q and of dO"
    return [tile for _, tiles in sorted(numbers.items()) for tile in tiles[::2]]


@pytest.mark.parametrize("lengths", [pytest.param((), marks=pytest.mark.full), ((256, 256),)])
def test_key_tiles_walk_the_heads_of_a_group_side_by_side_down_and_up_in_turn(lengths, monkeypatch):
    grouped = Case(256, 256, heads=4, heads_kv=2, dim=128, mask=Causal(), section=1, lengths=lengths)
    down = [(h, row) for rows in ((192, 128, 64, 0), (192, 128)) for row in rows for h in (0, 1)]
    up = [(h, row) for rows in ((0, 64, 128, 192), (128, 192)) for row in rows for h in (2, 3)]
    assert walked(grouped, monkeypatch) == down + up


@pytest.mark.full
def test_key_tiles_of_narrow_heads_walk_tiles_of_128_queries(monkeypatch):
    grouped = Case(256, 256, heads=4, heads_kv=2, mask=Causal(), section=1, long=True)
    down = [(h, row) for rows in ((128, 0), (128,)) for row in rows for h in (0, 1)]
    up = [(h, row) for rows in ((0, 128), (128,)) for row in rows for h in (2, 3)]
    assert walked(grouped, monkeypatch) == down + up


def test_half_of_a_section_that_runs_at_once_walks_down_and_the_other_up(monkeypatch):
    grouped = Case(256, 256, heads=4, heads_kv=2, dim=128, mask=Causal(), section=2, at_once=3)
    down = [(first + h, row) for first in (0, 2) for row in (192, 128, 64, 0) for h in (0, 1)]
    up = [(first + h, row) for first in (0, 2) for row in (128, 192) for h in (0, 1)]
    assert walked(grouped, monkeypatch) == down + up


@pytest.mark.parametrize("group", [1, 2])
def test_key_tiles_that_add_in_turns_walk_up_the_shortest_first_and_down_the_longest_first(group, monkeypatch):
    grouped = Case(256, 256, heads=2 * group, heads_kv=2, mask=Causal(), section=1, deterministic=True)
    up = [(h, row) for rows in ((128, 192), (0, 64, 128, 192)) for row in rows for h in range(group)]
    down = [(group + h, row) for rows in ((192, 128, 64, 0), (192, 128)) for row in rows for h in range(group)]
    assert walked(grouped, monkeypatch) == up + down


@pytest.mark.full
def test_key_tiles_of_large_groups_that_add_in_turns_walk_as_others(monkeypatch):
    grouped = Case(256, 256, heads=8, heads_kv=2, dim=128, mask=Causal(), section=1, deterministic=True)
    assert walked(grouped, monkeypatch) == walked(replace(grouped, deterministic=False), monkeypatch)


def additions(case, monkeypatch, **options):
    """For each box of dQ the CTAs that add to it, in the order in which they do."""
    found, current, store, write = {}, [], hopper._store, Descriptor.write

    def noted_store(role, view, put, inside):
        def noted(agent, bits):
            current[:] = [role.program.number]
            put(agent, bits)

        return store(role, view, noted, inside)

    def noted_write(descriptor, memory, first, *rest):
        if descriptor.kind.elem == "f32":  # dQ, which the first CTA writes
            found.setdefault(first, []).append(current[0])
        return write(descriptor, memory, first, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(hopper, "_store", noted_store)
        patched.setattr(Descriptor, "write", noted_write)
        check_right(case, **options)
    return found


IN_TURNS = {  # a CTA has one key tile above 128 columns
    "laps": Case(200, 400, heads=3, heads_kv=3, mask=Causal(), deterministic=True, section=2, at_once=3),
    "laps-of-a-head": Case(300, 600, heads=2, mask=Causal(), deterministic=True, section=1, at_once=2),
    "groups": Case(130, 400, heads=14, heads_kv=2, mask=Causal(), deterministic=True, section=1, at_once=2),
    "window": Case(300, 300, heads=2, heads_kv=2, mask=SlidingWindow(100, 20), deterministic=True),
    "256": Case(130, 260, dim=256, mask=Causal(), deterministic=True),
    "192": Case(130, 260, dim=192, dim_v=128, heads=2, heads_kv=2, mask=Causal(), deterministic=True, section=1),
    "ragged": Case(0, 0, lengths=((130, 300), (100, 140)), mask=Causal(), deterministic=True),
    "two-sums": Case(130, 660, dim=256, mask=Causal(), deterministic=True, section=1, at_once=4),
    "two-sums-of-groups": Case(130, 660, heads=7, mask=Causal(), deterministic=True),
    "two-sums-ragged": Case(0, 0, lengths=((130, 300), (100, 140)), dim=256, mask=Causal(), deterministic=True),
}


@pytest.mark.parametrize("name", drawn(IN_TURNS, ["laps"]))
def test_ctas_wait_for_turns_of_those_before_them_alone(name, monkeypatch):
    """So that CTAs which have begun never wait for one that has not, however few run at once."""
    case = IN_TURNS[name]
    found = additions(case if case.dim > 64 else replace(case, dim=256), monkeypatch, schedule="random", seed=1)
    assert any(len(ctas) > 1 for ctas in found.values())
    assert all(ctas == sorted(set(ctas)) for ctas in found.values())


@pytest.mark.parametrize("dim", drawn([64, 128], [128]))
@pytest.mark.parametrize("name", drawn([name for name, case in IN_TURNS.items() if case.dim == 64], ["laps"]))
def test_one_cta_takes_all_turns(name, dim, monkeypatch):
    """It would wait forever for the turn of a key tile that comes later."""
    found = additions(replace(IN_TURNS[name], dim=dim), monkeypatch, schedule="random", seed=1, programs=1)
    assert any(len(ctas) > 1 for ctas in found.values())


def test_key_tiles_that_last_rows_do_not_see_walk_head_after_head(monkeypatch):
    window = Case(256, 256, heads=2, dim=128, mask=SlidingWindow(65) & Causal())
    tiles = ((0, 64, 128), (128, 192))
    assert walked(window, monkeypatch) == [(h, row) for rows in tiles for h in (0, 1) for row in rows]


@pytest.mark.parametrize("dim", drawn([64, 256], [64]))
def test_keys_that_no_query_sees_may_be_nan(dim):
    case = Case(100, 400, dim=dim, mask=SlidingWindow(100))  # rows see keys from 201 on
    inputs = case.inputs()
    truth = gradients(case, inputs, torch.float64)
    allowed = tolerances(case, inputs, truth)
    x = operands(case, inputs, truth)
    with torch.no_grad():
        x.k[:, :128] = x.v[:, :128] = torch.nan
    fitting = fitted_gradients(x)
    assert all(run_launch(launch, Options()).clean for launch in launches(case, fitting, inputs))
    write_back(fitting, x)
    assert not x.dk[:, :128].any() and not x.dv[:, :128].any()
    assert all(error(made, truth[name]) <= allowed[name] for name, made in (("dq", x.dq), ("dk", x.dk), ("dv", x.dv)))


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    drawn(
        ["deterministic-heads", "deterministic-laps", "deterministic-groups", "deterministic-full",
         "deterministic-two-sums", "deterministic-groups-256"],
        ["deterministic-groups"],
    ),
)
def test_deterministic_gradients_have_the_same_bits_in_every_schedule(name):
    found = [simulated(CASES[name], schedule=schedule, seed=seed)[2] for schedule, seed in (("lazy", 0), ("random", 3))]
    assert torch.equal(*found)


@pytest.mark.parametrize(("schedule", "seed"), drawn(SCHEDULES, [("adversarial", 0), ("random", 0)]))
@pytest.mark.parametrize("name", ["claims", "groups", "dim-256"])
def test_every_schedule(name, schedule, seed):
    check_right(CASES[name], schedule=schedule, seed=seed)
