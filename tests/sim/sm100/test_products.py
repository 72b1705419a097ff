"""Blackwell's products of 8 bits in the simulator: right values, no findings, every synchronisation needed."""

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.drawn import drawn, in_turn
from tests.oracle import poisoned
from tests.sim import products
from tests.sim.cdna.calls import Case as AnyKind
from tests.sim.cdna.calls import error, in_eight_bits, paged, ragged
from tests.sim.knocking import knocked_out, reviewed
from tests.sim.products import Case, Given, checked_call, operands
from tests.sim.sm100.test_1q import REDUNDANT as ONE_TILE
from tests.sim.sm100.test_knockout import REDUNDANT as TWO_TILES
from warpattn.api import attention
from warpattn.errors import AttentionError
from warpattn.kernels.sm100.prefill_1q.config import choice_of
from warpattn.kernels.sm100.prefill_2q.config import choose_2q, prefill_config
from warpattn.kernels.sm100.select import choose, launches_of_choice
from warpattn.masks import Causal, CustomMask, Document, Padding, Prefix, SlidingWindow
from warpattn.problem import Call, Problem, validate
from warpattn.problem.arch import ARCHS, triton_target
from warpattn.problem.launch import Choice, Launch
from warpattn.problem.operands import Operands, fitted
from warpattn.quantized import quantize
from warpattn.reference import reference
from warpattn.runtime.simulate import Options, run_launch
from warpattn.scores import ALiBi, Bias, SoftCap
from warpattn.sequences import PagedKV, Ragged
from warpattn.sim import Report, simulate
from warpattn.sim.compile import to_ttgir

SCHEDULES = [("eager", 0), ("lazy", 0), ("adversarial", 0), ("random", 1)]
E4M3 = torch.float8_e4m3fn
LOWEST = torch.finfo(torch.float32).min
NOTHING = CustomMask(lambda b, h, q, k: k < 0)
CHUNKS = ("ttng.wait_barrier", "ring.acquire_k(state, c)", "the chunks of a K tile are given back together")
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.05])


def drawn_bias(*shape: int) -> Bias:
    return Bias(torch.randn(shape, generator=torch.Generator().manual_seed(2)))


CASES = {
    "128": Case(300, 500, sinks=True),
    "128-full": Case(300, 300, heads=1, heads_kv=1, mask=None),
    "64": Case(300, 300, dim=64, mask=None, dtype=torch.float16),
    "64-causal": Case(200, 500, heads=2, heads_kv=1, dim=64, per="tensor"),
    "batch": Case(130, 200, heads=2, batch=2, dim=64),
    "groups-of-3": Case(140, 300, heads=3, heads_kv=1, mask=SlidingWindow(90, 20)),
    "odd-dims": Case(200, 150, heads=2, heads_kv=1, dim=80, dim_v=96),
    "wide-values": Case(140, 300, heads=2, heads_kv=1, dim=64, dim_v=128),
    "narrow-values": Case(140, 300, heads=2, heads_kv=1, dim=128, dim_v=32),
    "soft-cap": Case(150, 260, score=SoftCap(3.0)),
    "alibi": Case(150, 260, dim=64, score=ALiBi(SLOPES)),
    "bias": Case(140, 140, heads=2, heads_kv=1, dim=64, mask=None, score=drawn_bias(1, 2, 140, 140)),
    "prefix": Case(200, 200, heads=2, heads_kv=1, mask=Prefix(50), dtype=torch.float16),
    "document": Case(256, 256, heads=2, heads_kv=1, dim=64, mask=Document(torch.arange(256)[None] // 100)),
    "padding": Case(140, 200, heads=2, heads_kv=1, batch=2, mask=Padding(torch.tensor([150, 0]))),
    "nothing-visible": Case(140, 140, heads=1, heads_kv=1, mask=NOTHING, sinks=True),
    "64-rows": Case(200, 300, heads=3, heads_kv=1, batch=2, per="64 rows"),
    "64-rows-score": Case(300, 200, heads=2, heads_kv=1, dim=64, per="64 rows", score=SoftCap(3.0)),
    "128-rows": Case(300, 300, per="128 rows", mask=None),
    "negative-scale": Case(140, 140, scale=-0.3),
    "no-scale": Case(140, 140, heads=2, heads_kv=1, scale=0.0, dim=64),
}  # fmt: skip
# With the tests below: every dtype, kind of mask, score and scale.
DRAWN = ("64-rows-score",)


def one_tile(problem: Problem, parts: int = 1) -> Choice:
    """One query tile a CTA, keys in parts."""
    config = replace(prefill_config(problem)[0], BM=128, splitk_partitions=parts).gluon()[0]
    assert config.supported() == ()
    return choice_of(problem, config)


def run(case: Case, given: Given, chosen: Any, schedule: str = "lazy", seed: int = 0) -> None:
    """Simulate the launches of a choice and hold their values against the reference."""
    checked, x, sequence = checked_call(case, given, "simulate:sm100")
    launched(launches_of_choice(checked, fitted(x), sequence, chosen(checked.problem)), schedule, seed)
    products.check(case, given, x)


def launched(steps: tuple[Launch, ...], schedule: str, seed: int = 0) -> None:
    """Simulate launches, and find nothing."""
    for step in steps:
        report = run_launch(step, Options(schedule, seed))
        assert report.clean, report


@pytest.mark.parametrize(("name", "schedule", "seed"), in_turn(CASES, DRAWN, SCHEDULES, each=4))
def test_two_query_tiles(name, schedule, seed):
    run(CASES[name], operands(CASES[name]), choose_2q, schedule, seed)


ONE = {name: CASES[name] for name in ("128", "64", "alibi", "odd-dims", "wide-values", "narrow-values", "64-rows")}
ONE |= {"one-row": Case(1, 700, heads=8, heads_kv=2), "one-key-tile": Case(100, 100)}
ONE |= {"one-row-64-rows": Case(1, 300, heads=4, heads_kv=2, per="64 rows")}  # a token alone is a block of rows
ONE |= {"one-key-128-rows": Case(40, 1, heads=2, heads_kv=1, dim=64, mask=None, per="128 rows")}
PARTS = [(name, parts) for name in ONE for parts in (1, 4)]


KEPT = [("128", 1)]


@pytest.mark.full
@pytest.mark.parametrize(("part", "schedule", "seed"), in_turn(PARTS, KEPT, SCHEDULES, each=4), ids=str)
def test_one_query_tile(part, schedule, seed):
    name, parts = part
    run(ONE[name], operands(ONE[name]), lambda problem: one_tile(problem, parts), schedule, seed)


@pytest.mark.full
@pytest.mark.parametrize(("dim", "parts"), drawn([(128, 0), (64, 4)], [(64, 4)]))
def test_e5m2(dim, parts):
    """Operands of e5m2 with weights of e4m3, of two query tiles or one."""
    case = Case(200, 700, dim=dim, sinks=True)
    given = tuple(quantize(x.dequantized(), torch.float8_e5m2, per="head") for x in operands(case))
    for schedule, seed in SCHEDULES:
        run(case, given, (lambda problem: one_tile(problem, parts)) if parts else choose_2q, schedule, seed)


KINDS = {
    "ragged": lambda: ragged(AnyKind(1, 1, heads=4, heads_kv=2, dim=128, mask=Causal()), [30, 150, 0], [90, 150, 10]),
    "ragged-64": lambda: ragged(AnyKind(1, 1, heads=3, mask=SlidingWindow(40)), [30, 270, 1], [90, 300, 10]),
    "pages": lambda: paged(AnyKind(140, 1, heads=4, heads_kv=2, dim=128, mask=Causal()), [170, 0, 300], 16),
    "decode": lambda: paged(AnyKind(2, 1, heads=8, heads_kv=2, dim=128, mask=Causal(), sinks=True), [70, 0, 300], 64),
    "decode-8": lambda: paged(AnyKind(1, 1, heads=4), [70, 300], 8),
    "pages-of-48": lambda: paged(AnyKind(40, 1, heads=2, dim=64, mask=Causal()), [170, 0, 200], 48),
    "decode-24": lambda: paged(AnyKind(3, 1, heads=4, mask=Causal()), [70, 300], 24),
}  # fmt: skip


def in_bytes(call: Call) -> Call:
    """The call with q, k and v of 8 bits; heads of queries differ in size, and scores by 1 at least."""
    call = in_eight_bits(call, E4M3)
    sequence = call.sequence
    assert isinstance(sequence, Ragged | PagedKV)
    q = quantize(call.q.float() * 4 * (1 + torch.arange(call.q.shape[-2])[:, None] / 2), per="head")
    return replace(call, q=q.values, sequence=replace(sequence, q_scale=q.scale))


TILES = [(name, two) for name in KINDS for two in (True, False)]  # two query tiles a CTA, or what a plan chooses
TILES_DRAWN = [("decode-24", False)]


@pytest.mark.full
@pytest.mark.parametrize(("kind", "schedule", "seed"), in_turn(TILES, TILES_DRAWN, SCHEDULES, each=4), ids=str)
def test_other_kinds_of_sequences(kind, schedule, seed):
    """Pages of no sequence, and what is past the end of one, are NaN."""
    name, two = kind
    torch.manual_seed(1)
    call = in_bytes(KINDS[name]())
    _, k, v = call.sequence.operands(call.q, call.k, call.v).values()
    tail: dict[str, Any] = {"mask": call.mask, "sinks": call.sinks}
    expected, expected_lse = reference(call.q, call.k, call.v, sequence=call.sequence, **tail)
    out = poisoned((*call.q.shape[:-1], v.shape[-1]), torch.bfloat16)
    checked = validate(replace(call, out=out, backend="simulate:sm100"))
    lse = poisoned(checked.lse_shape, torch.float32)
    choice = choose_2q(checked.problem) if two else choose(checked.problem, ARCHS["sm100"])
    x = fitted(Operands(call.q, k, v, out, lse, call.sinks))
    launched(launches_of_choice(checked, x, call.sequence, choice), schedule, seed)
    products.near(out.float(), expected)
    assert error(lse, expected_lse) < 1e-4


@pytest.mark.full
def test_references_that_have_to_move():
    """Scores that grow or shrink by hundreds from tile to tile, and rows of equal ones."""
    case = replace(CASES["128"], mask=None)
    q, k, v = operands(case)
    size = torch.arange(500).view(1, -1, 1, 1) / 500
    for sizes in (size, 1 - size):
        grown = quantize(k.dequantized() * 40 * sizes, scale=k.scale)
        run(case, (q, replace(k, values=grown.values), v), choose_2q, "random")
    run(case, (replace(q, values=torch.zeros_like(q.values.float()).to(E4M3)), k, v), choose_2q)


@pytest.mark.parametrize("score", [2.0**22, 9e6, 1.2e7, 2e7, 2.4e7, 3e7, 6e7, 1e9, -2e7, -3e7, LOWEST])
def test_large_scores(score):
    """Of equal scores, however large, every value gets its share: no weight exceeds what e4m3 holds. Exponents of large
    ones are rounded, so the weights may be none that e4m3 has, and all are rounded alike: by 1/16 at most."""
    case = Case(20, 300, heads=1, heads_kv=1, dim=64, mask=None, score=Bias(torch.full((1, 1, 20, 300), score)))
    q, k, v = operands(case)
    given = replace(q, values=torch.zeros_like(q.values.float()).to(E4M3)), k, v
    checked, x, sequence = checked_call(case, given, "simulate:sm100")
    chosen = choose(checked.problem, ARCHS["sm100"])
    launched(launches_of_choice(checked, fitted(x), sequence, chosen), "lazy")
    exact = v.dequantized().mean(1, keepdim=True).expand(1, 20, 1, 64)
    assert (x.out.float() - exact).norm() <= 0.0625 * exact.norm()


@pytest.mark.full
@pytest.mark.parametrize(("case", "two", "unneeded"), [
    (Case(256, 900, heads=1, heads_kv=1), True, 9),  # two chunks of K: a slot is free at first, or both are at once
    (Case(256, 2500, heads=1, heads_kv=1, dim=64), True, 7),
    (Case(100, 2900, heads=1, heads_kv=1, mask=None), False, 6),
])  # fmt: skip
def test_it_needs_its_synchronisation(case, two, unneeded):
    """Just the reviewed operations go unnoticed, `unneeded` of them beside fences."""
    q, k, v = operands(case)
    grown = quantize(k.dequantized() * (20 - torch.arange(case.keys).view(1, -1, 1, 1) / case.keys), scale=k.scale)
    given = (q, replace(k, values=grown.values), v)

    def first_step() -> Launch:
        checked, x, sequence = checked_call(case, given, "simulate:sm100")
        choice = choose_2q(checked.problem) if two else one_tile(checked.problem)
        return launches_of_choice(checked, fitted(x), sequence, choice)[0]

    step = first_step()

    def once(module, schedule) -> Report:
        fresh = first_step()
        return simulate(module, fresh.grid, fresh.args, schedule, step_limit=20_000, first_finding=True)

    kernel = to_ttgir(step.source(), triton_target("sm100"), dict(step.options))
    results = knocked_out(kernel, once, reviewed([*(TWO_TILES if two else ONE_TILE), CHUNKS]))
    modelled = [found for found in results if "fence" not in found.op]
    assert sum(not found.noticed for found in modelled) == unneeded


REFUSED = [
    ({"dtype": torch.float8_e4m3fnuz}, "dtype torch.float8_e4m3fnuz; with 8-bit queries the sm100 backend takes"),
    ({"per": "token"}, "q has a scale per token; with 8-bit queries the sm100 backend takes tensor, head"),
    ({"dim": 256}, "the head_dim is 256; with 8-bit queries the sm100 backend takes at most 128"),
    ({"dim": 72}, "head_dim of k is 72; with 8-bit queries the sm100 backend takes multiples of 16"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED)
def test_what_the_kernels_do_not_take(changed, message):
    chosen: dict[str, Any] = {"dtype": E4M3, "per": "head", "dim": 64} | changed
    x = quantize(torch.randn(1, 20, 2, chosen["dim"]), chosen["dtype"], per=chosen["per"])
    with pytest.raises(AttentionError, match=message):
        attention(x, x, x, backend="simulate:sm100")
