"""Blackwell's kernel for head dims above 128 over 8-bit keys and values: values, findings, synchronisation."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.drawn import drawn
from tests.sim.cdna.calls import TOLERANCE, Case, error, in_eight_bits, paged, ragged, ready_of
from tests.sim.knocking import FRESH, knocked_out, reviewed
from tests.sim.sm100.test_eight_bit import (
    E4M3,
    E5M2,
    SCHEDULES,
    check,
    check_every_number,
    choice_of,
    multiplied,
    steps,
)
from tests.sim.sm100.test_mla import REDUNDANT
from warpattn.api import attention, attention_paged
from warpattn.errors import AttentionError
from warpattn.masks import Causal, Padding, SlidingWindow
from warpattn.problem import Call
from warpattn.problem.arch import triton_target
from warpattn.quantized import Quantized, quantize
from warpattn.runtime.plan import plan
from warpattn.scores import SoftCap
from warpattn.sequences import PagedKV, Ragged
from warpattn.sim import Report, simulate
from warpattn.sim.compile import to_ttgir

WIDE = Case(1, 1, heads=4, dim=256, mask=Causal())
CASES = {
    "prefill": (Case(150, 330, heads=1, dim=256, mask=Causal(), sinks=True).call, ("tensor", "head")),
    "fp16": (Case(70, 300, heads=4, heads_kv=2, dim=192, dim_v=144, dtype=torch.float16, mask=SlidingWindow(99)).call,
             ("head", "tensor")),
    "score": (Case(140, 200, dim=160, score=SoftCap(3.0)).call, ("tensor", "tensor")),
    "narrow-values": (Case(140, 300, dim=256, dim_v=64, mask=Padding(torch.tensor([150]))).call, ("token", 64)),
    "narrow-keys": (Case(140, 300, dim=64, dim_v=192, mask=Causal()).call, (64, 64)),
    "columns": (Case(150, 330, heads=4, heads_kv=2, dim=192, dim_v=256, mask=Causal(), score=SoftCap(9.0)).call,
                (64, 128)),
    "keys-of-columns": (Case(20, 200, dim=256, batch=2).call, (128, "head")),
    "tokens": (Case(20, 200, dim=176, batch=2, mask=SlidingWindow(90)).call, ("token", "token")),
    "rows": (Case(140, 300, heads=4, heads_kv=2, dim=256, batch=2, mask=Causal()).call, ("64 rows", "token")),
    "one-tile": (Case(10, 40, dim=256).call, (64, "token")),
    "ragged": (lambda: ragged(WIDE, [30, 150, 0], [90, 150, 10]), (128, "token")),
    "pages": (lambda: paged(replace(WIDE, seq_q=140), [170, 0, 300], 16), (64, "head")),
    "pages-of-8": (lambda: paged(replace(WIDE, seq_q=3, heads=8, heads_kv=2), [70, 300], 8), ("tensor", "token")),
    "decode": (lambda: paged(replace(WIDE, heads=8, heads_kv=2, sinks=True), [70, 0, 300], 64), ("head", "tensor")),
    "splits": (lambda: paged(WIDE, [1100, 700], 16), ("token", 128)),
}  # fmt: skip


def stored(name: str, dtype: torch.dtype = E4M3, per: tuple[str | int, str | int] | None = None) -> Call:
    torch.manual_seed(1)
    call, usual = CASES[name]
    return in_eight_bits(call(), dtype, per or usual)


@pytest.mark.parametrize("name", drawn(CASES, ["splits"]))
def test_right_and_without_findings(name):
    """Under every schedule; pages of no sequence are NaN."""
    call = stored(name)
    choice = choice_of(call, two=False)
    assert choice.kernel == "wide" and (choice.partitions > 1) == (name == "splits")
    for schedule in SCHEDULES:
        check(call, choice, schedule)


@pytest.mark.full
def test_ragged_queries_over_pages():
    call = stored("decode", per=("token", 64))
    kv, seq = call.sequence, Ragged(torch.tensor([0, 20, 20, 23]).int(), max_q=20)
    assert isinstance(kv, PagedKV)
    q = torch.randn(23, 8, 256).bfloat16()
    rows = multiplied(call).sequence
    assert isinstance(rows, PagedKV)
    found, expected = (attention_paged(q, pages, seq, mask=Causal(), backend=backend)
                       for pages, backend in ((kv, "simulate:sm100"), (rows, "reference")))  # fmt: skip
    assert error(found.float(), expected.float()) < TOLERANCE[torch.bfloat16]


@pytest.mark.full
def test_the_other_format():
    call = stored("keys-of-columns", E5M2)
    check(call, choice_of(call, two=False), "adversarial")


@pytest.mark.full
@pytest.mark.parametrize("scale", drawn([-0.3, 0.0, 2.0**-120], [-0.3]))
def test_softmax_scales(scale):
    """Below 0, 0, and one whose product with the keys' is no normal number."""
    call = replace(stored("decode"), scale=scale)
    check(call, choice_of(call, two=False), "lazy")


FORMATS = [(E4M3, torch.float16), (E5M2, torch.bfloat16)]


@pytest.mark.full
@pytest.mark.parametrize(("stored_as", "dtype"), drawn(FORMATS, FORMATS[:1]))
def test_every_number_of_the_format(stored_as, dtype):
    check_every_number(stored_as, dtype, heads=1)


@pytest.mark.full
@pytest.mark.usefixtures("unread_scales")
@pytest.mark.parametrize("per", drawn(["token", 64], [64]))
def test_scales_and_values_of_nobody(per):
    """Behind the last key that a row sees, on pages of nobody and past the end, bytes and scales may be anything."""
    call = stored("narrow-values", per=(per, per))
    q, k, v = call.q, Quantized(call.k, call.sequence.k_scale), Quantized(call.v, call.sequence.v_scale)
    expected = attention(q, k, v, mask=call.mask)
    v.scale[:, 150:] = torch.nan
    v.values.view(torch.uint8)[:, 150:] = 0x7F
    found = attention(q, k, v, mask=call.mask, backend="simulate:sm100")
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
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
@pytest.mark.parametrize("operand", ["k_scale", "v_scale"])
def test_a_wrong_scale_is_seen(operand):
    """The tolerance is no wider than three tenths of the scale of one of four blocks of columns."""
    call = stored("decode", per=(64, 64))
    right = getattr(call.sequence, operand)
    wrong = replace(call, sequence=replace(call.sequence, **{operand: right * torch.tensor([1.0, 1.0, 1.0, 1.3])}))
    found, expected = (attention_paged(x.q, x.sequence, mask=x.mask, sinks=x.sinks, backend=name).float()
                       for x, name in ((wrong, "simulate:sm100"), (call, "reference")))  # fmt: skip
    assert error(found, expected) > TOLERANCE[torch.bfloat16]


def test_the_plan_says_what_runs():
    found = str(plan(ready_of(stored("splits"), "sm100").problem, "sm100"))
    assert "keys and values of 8 bits become 16-bit ones in two warps" in found and "scales of their tokens" in found
    assert "ring of 3 slots" in found


REASONS = [
    *REDUNDANT,
    ("ttng.wait_barrier", "state = load_tile(ctx, ctx.k, state, 0, config.k_blocks)", FRESH),
    ("ttng.wait_barrier", 'state = convert_next(ctx, state, "k", 0)', FRESH),
    ("mbarrier.arrive.release.cta.shared::cta.b64", "  # no keys follow", "the slot stays empty"),
]


@pytest.mark.full
@pytest.mark.parametrize("per", [("tensor", "head"), ("token", 64), ("head", "token")])
def test_it_needs_its_synchronisation(per):
    torch.manual_seed(0)
    call = in_eight_bits(Case(200, 900, heads=1, dim=256, mask=Causal()).call(), E4M3, per)
    choice = choice_of(call, two=False)
    step = steps(call, choice)[0][0]

    def once(module, schedule) -> Report:
        fresh = steps(call, choice)[0][0]
        return simulate(module, fresh.grid, fresh.args, schedule, step_limit=20_000, first_finding=True)

    kernel = to_ttgir(step.source(), triton_target("sm100"), dict(step.options))
    results = knocked_out(kernel, once, reviewed(REASONS))
    modelled = [found for found in results if "fence" not in found.op]
    assert sum(found.noticed for found in modelled) >= len(modelled) - 5, "each of the others has a reason above"


def test_what_the_kernel_does_not_take():
    x = torch.zeros(1, 16, 2, 264)
    q = torch.zeros(1, 16, 2, 264).bfloat16()
    with pytest.raises(AttentionError, match="head_dim of k is 264; with 8 bits the sm100 backend takes multiples"):
        attention(q, quantize(x), quantize(x), backend="simulate:sm100")
    x, q = torch.zeros(1, 16, 2, 272), torch.zeros(1, 16, 2, 272).bfloat16()
    with pytest.raises(AttentionError, match="head_dim is 272; with 8 bits the sm100 backend takes at most 256"):
        attention(q, quantize(x), quantize(x), backend="simulate:sm100")
