"""Blackwell prefill and decode over 8-bit keys and values in the simulator: values, findings, synchronisation."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.drawn import drawn
from tests.sim.cdna.calls import TOLERANCE, Case, error, in_eight_bits, outputs, paged, ragged, ready_of
from tests.sim.knocking import FRESH, knocked_out, reviewed
from tests.sim.sm100.test_1q import REDUNDANT as ONE_TILE
from tests.sim.sm100.test_knockout import REDUNDANT as TWO_TILES_REDUNDANT
from warpattn.api import attention, attention_paged
from warpattn.errors import AttentionError
from warpattn.kernels.sm100.prefill_2q.config import choose_2q
from warpattn.kernels.sm100.select import choose, launches_of_choice
from warpattn.masks import Causal, Padding, SlidingWindow
from warpattn.problem import Call
from warpattn.problem.arch import ARCHS, triton_target
from warpattn.problem.launch import Choice, Launch
from warpattn.problem.operands import Operands, fitted
from warpattn.quantized import Quantized, dequantized, quantize
from warpattn.reference import reference
from warpattn.runtime.simulate import Options, run_launch
from warpattn.scores import SoftCap
from warpattn.sequences import PagedKV
from warpattn.sim import Report, simulate
from warpattn.sim.compile import to_ttgir

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCHEDULES = ("eager", "lazy", "adversarial", "random")
CASES = {
    "two-tiles": lambda: Case(300, 700, heads=1, dim=128, mask=Causal(), sinks=True).call(),
    "two-rings": lambda: Case(200, 700, heads=4, heads_kv=2, mask=SlidingWindow(300), dtype=torch.float16).call(),
    "odd-dims": lambda: Case(200, 300, dim=80, dim_v=48, score=SoftCap(3.0)).call(),
    "wide-values": lambda: Case(140, 300, dim=64, dim_v=128, mask=Causal()).call(),
    "narrow-values": lambda: Case(140, 300, dim=128, dim_v=64, mask=Padding(torch.tensor([150]))).call(),
    "ragged": lambda: ragged(Case(1, 1, heads=4, heads_kv=2, dim=128, mask=Causal()), [30, 150, 0], [90, 150, 10]),
    "pages": lambda: paged(Case(140, 1, heads=2, dim=128, mask=Causal()), [170, 0, 300], 16),
    "decode": lambda: paged(Case(2, 1, heads=8, heads_kv=2, dim=128, mask=Causal(), sinks=True), [70, 0, 300], 64),
    "decode-8": lambda: paged(Case(1, 1, heads=4), [70, 300], 8),
}  # fmt: skip
CONVERTING = [
    ("ttng.wait_barrier", "state = convert_next(ctx, first_state(ctx)", FRESH),
    ("ttng.wait_barrier", "  # into the second slot", FRESH),
    ("mbarrier.arrive.release.cta.shared::cta.b64", "  # no tile follows", "the slot stays empty"),
]
REDUNDANT = {True: [*TWO_TILES_REDUNDANT, *CONVERTING], False: [*ONE_TILE, *CONVERTING]}
TWO_TILES = ("two-tiles", "two-rings", "odd-dims", "wide-values", "narrow-values", "pages")


def stored(name: str, dtype: torch.dtype = E4M3, per: tuple[str | int, str | int] = ("tensor", "head")) -> Call:
    torch.manual_seed(1)
    return in_eight_bits(CASES[name](), dtype, per)


def choice_of(call: Call, two: bool) -> Choice:
    """The planner's, or that of two query tiles a CTA."""
    problem = ready_of(call, "sm100").problem
    return choose_2q(problem) if two else choose(problem, ARCHS["sm100"])


def steps(call: Call, choice: Choice) -> tuple[tuple[Launch, ...], Operands]:
    """The launches of a call with fresh outputs, and its operands."""
    ready = ready_of(call, "sm100")
    given = call.sequence.operands(call.q, call.k, call.v).values()
    fitting = fitted(Operands(*given, *outputs(call, ready), call.sinks))
    return launches_of_choice(ready, fitting, call.sequence, choice), fitting


def multiplied(call: Call) -> Call:
    """The call with keys and values as the kernels multiply them where tokens have scales: times these, in bf16."""
    rows, changes = {"k": call.k, "v": call.v}, {}
    for name, scale in (("k", call.sequence.k_scale), ("v", call.sequence.v_scale)):
        if scale is not None and scale.ndim > 1:
            rows[name] = dequantized(rows[name], scale).bfloat16()
            pages = {f"{name}_pages": rows[name]} if isinstance(call.sequence, PagedKV) else {}
            changes |= {f"{name}_scale": None} | pages
    return replace(call, **rows, sequence=replace(call.sequence, **changes)) if changes else call


def check(call: Call, choice: Choice, schedule: str) -> None:
    """The kernels' results are those of the reference, and nothing is found."""
    launches, x = steps(call, choice)
    for step in launches:
        report = run_launch(step, Options(schedule=schedule))
        assert report.clean, str(report)
    tail: dict[str, Any] = {"mask": call.mask, "score": call.score, "sinks": call.sinks, "scale": call.scale}
    call = multiplied(call)
    out, lse = reference(call.q, call.k, call.v, sequence=call.sequence, **tail)
    assert x.lse is not None
    assert error(x.out[..., : out.shape[-1]].float(), out) < TOLERANCE[call.q.dtype]
    assert error(x.lse, lse) < 1e-4


@pytest.mark.parametrize("name", drawn(CASES, ["decode"]))
def test_values(name):
    """What the planner chooses, under every schedule; pages of no sequence are NaN."""
    call = stored(name)
    for schedule in SCHEDULES:
        check(call, choice_of(call, two=False), schedule)


@pytest.mark.full
@pytest.mark.parametrize("name", drawn(TWO_TILES, ["two-tiles"]))
def test_two_query_tiles(name):
    call = stored(name)
    for schedule in SCHEDULES:
        check(call, choice_of(call, two=True), schedule)


SCALED = {
    "two-tiles": (64, 64),
    "odd-dims": ("token", "token"),
    "wide-values": ("token", 64),
    "narrow-values": (64, "token"),
    "ragged": ("token", 64),
    "pages": (64, "head"),
    "decode": (64, 64),
    "decode-8": ("tensor", "token"),
    "splits": ("token", "token"),
    "rows": ("64 rows", "token"),
    "few-rows": ("128 rows", "head"),
}
CASES |= {
    "splits": lambda: paged(Case(1, 1, heads=4, dim=128, mask=Causal()), [1100, 700], 16),
    "rows": lambda: Case(140, 300, heads=4, heads_kv=2, dim=128, batch=2, mask=Causal()).call(),
    "few-rows": lambda: Case(2, 700, heads=4, heads_kv=2, dim=64, batch=2, mask=Causal()).call(),
}


@pytest.mark.full
@pytest.mark.parametrize("name", drawn(SCALED, ["decode"]))
def test_scales_of_tokens_and_of_columns(name):
    """Under every schedule."""
    call = stored(name, per=SCALED[name])
    for schedule in SCHEDULES:
        check(call, choice_of(call, two=False), schedule)


@pytest.mark.parametrize("name", drawn([name for name in TWO_TILES if name in SCALED], ["wide-values"]))
def test_scales_with_two_query_tiles(name):
    call = stored(name, per=SCALED[name])
    for schedule in SCHEDULES:
        check(call, choice_of(call, two=True), schedule)


@pytest.mark.full
@pytest.mark.parametrize("per", drawn(["token", 64], [64]))
def test_scales_of_nobody(per):
    """Scales of pages that no sequence has, and of rows past the end, are NaN."""
    call = stored("pages", per=(per, per))
    kv = call.sequence
    assert isinstance(kv, PagedKV) and kv.k_scale is not None and kv.v_scale is not None
    expected = attention_paged(call.q, kv, mask=call.mask)
    garbage = call.k.float().isnan().all(-1)
    assert garbage.any()
    kv.k_scale[garbage] = kv.v_scale[garbage] = torch.nan
    found = attention_paged(call.q, kv, mask=call.mask, backend="simulate:sm100")
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.full
@pytest.mark.usefixtures("unread_scales")
@pytest.mark.parametrize("per", drawn(["token", 64], ["token"]))
def test_scales_of_values_that_no_row_sees(per):
    """Behind the last key that any row of a query tile sees, bytes and scales may be anything."""
    call = stored("narrow-values", per=(per, "token"))
    q, k, v = call.q, Quantized(call.k, call.sequence.k_scale), Quantized(call.v, call.sequence.v_scale)
    expected = attention(q, k, v, mask=call.mask)
    v.scale[:, 150:] = torch.nan
    v.values.view(torch.uint8)[:, 150:] = 0x7F
    found = attention(q, k, v, mask=call.mask, backend="simulate:sm100")
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.full
@pytest.mark.parametrize("operand", ["k_scale", "v_scale"])
def test_a_wrong_scale_is_seen(operand):
    """The tolerance is no wider than a tenth of the scale of a block of columns."""
    call = stored("decode", per=(64, 64))
    right = getattr(call.sequence, operand)
    wrong = replace(call, sequence=replace(call.sequence, **{operand: right * torch.tensor([1.0, 1.1])}))
    tail = {"mask": call.mask, "sinks": call.sinks, "return_lse": True}  # the kernel of the tests above has an LSE
    found, expected = (attention_paged(x.q, x.sequence, **tail, backend=name)[0].float()
                       for x, name in ((wrong, "simulate:sm100"), (call, "reference")))  # fmt: skip
    assert error(found, expected) > TOLERANCE[torch.bfloat16]


@pytest.mark.full
def test_the_other_format():
    call = stored("decode", E5M2)
    check(call, choice_of(call, two=False), "adversarial")


@pytest.mark.full
@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0**-120])
def test_softmax_scales(scale):
    """Below 0, 0, and one whose product with the keys' is no normal number."""
    call = replace(stored("decode"), scale=scale)
    check(call, choice_of(call, two=False), "lazy")


FORMATS = [(stored_as, dtype) for stored_as in (E4M3, E5M2) for dtype in (torch.bfloat16, torch.float16)]


def check_every_number(stored_as: torch.dtype, dtype: torch.dtype, heads: int) -> None:
    """One key, so the output is its value: exact for all 256 bytes, and NaN where they are."""
    v = torch.arange(256, dtype=torch.uint8).view(stored_as).reshape(1, 1, heads, 256 // heads)
    q, k = torch.zeros(v.shape, dtype=dtype), torch.zeros(v.shape).to(stored_as)
    found = attention(q, k, v, backend="simulate:sm100")
    assert isinstance(found, torch.Tensor)
    special = ~v.float().isfinite()
    assert torch.equal(found.float()[~special], v.float()[~special])
    assert torch.equal(found.float()[special].isnan(), v.float()[special].isnan())


@pytest.mark.full
@pytest.mark.parametrize(("stored_as", "dtype"), drawn(FORMATS, [FORMATS[0]]))
def test_every_number_of_the_format(stored_as, dtype):
    check_every_number(stored_as, dtype, heads=2)


@pytest.mark.full
@pytest.mark.parametrize(("two", "per"), list(product([True, False], [("tensor", "head"), ("token", 64)])))
def test_it_needs_its_synchronisation(two, per):
    torch.manual_seed(0)
    call = in_eight_bits(Case(200, 900, heads=1, dim=128, mask=Causal()).call(), E4M3, per)
    choice = choice_of(call, two)
    step = steps(call, choice)[0][0]

    def once(module, schedule) -> Report:
        fresh = steps(call, choice)[0][0]
        return simulate(module, fresh.grid, fresh.args, schedule, step_limit=20_000, first_finding=True)

    kernel = to_ttgir(step.source(), triton_target("sm100"), dict(step.options))
    results = knocked_out(kernel, once, reviewed(REDUNDANT[two]))
    unnoticed = [found for found in results if "fence" not in found.op and not found.noticed]
    # Each has a reason above. One query tile has two loads before its loops, whose slots are free, in two roles.
    assert len(unnoticed) == (9 if two else 11)


def test_what_the_kernels_do_not_take():
    x = torch.zeros(4, 16, 2, 64)
    table, lengths = torch.zeros(2, 2).int(), torch.ones(2).int()
    q = torch.zeros(2, 1, 4, 64).bfloat16()

    def refused(message: str, made) -> None:
        kv = PagedKV(made.values, made.values, table, lengths, k_scale=made.scale, v_scale=made.scale)
        with pytest.raises(AttentionError, match=message):
            attention_paged(q, kv, backend="simulate:sm100")

    refused("with 8 bits the sm100 backend takes torch.float8_e4m3fn", quantize(x, torch.float8_e4m3fnuz))
    refused("the page size is 4; with 8 bits the sm100 backend takes multiples of 8", quantize(x[:, :4]))
    tokens = quantize(x, per="token")
    kv = PagedKV(tokens.values, tokens.values, table, lengths, k_scale=tokens.scale)
    with pytest.raises(AttentionError, match=r"of k per token, which fp16 operands cannot hold, .* none of fp16"):
        attention_paged(q.half(), kv, backend="simulate:sm100")
