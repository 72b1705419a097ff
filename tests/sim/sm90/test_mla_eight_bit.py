"""Decode over 8-bit latents on Hopper in the simulator: right values, no findings, DeepSeek's bytes, knock-outs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import warpattn as wa
from tests.drawn import drawn, in_turn
from tests.oracle import UNWRITTEN
from tests.sim.knocking import knocked_out
from tests.sim.sm90.decode import Ran, built
from tests.sim.sm90.mla import DIM, DIM_V, SCALE, Latent, reason
from tests.sim.sm90.prefill import error
from warpattn.kernels.sm90.decode.config import with_fields
from warpattn.kernels.sm90.mla.config import choose
from warpattn.kernels.sm90.mla.launch import list_launches
from warpattn.masks import Causal, SlidingWindow
from warpattn.problem import Call, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.launch import PlanOptions
from warpattn.problem.operands import Operands
from warpattn.quantized import saturated
from warpattn.reference import reference
from warpattn.scores import SoftCap
from warpattn.sim import Report, simulate

SCHEDULES = [("eager", 0), ("lazy", 0), ("adversarial", 0), ("random", 0), ("random", 1)]
PER: tuple[str | int | None, ...] = (128, "token", "tensor", None)


def pages_of(case: Latent, per: str | int | None = 128, dtype: torch.dtype = torch.float8_e4m3fn) -> wa.LatentPages:
    """A cache of 656 bytes a token in DeepSeek's form, or with other scales; what no sequence owns is NaN."""
    generator = torch.Generator().manual_seed(case.seed)
    counts = [-(-length // case.page) for length in case.lengths]
    order = torch.randperm(sum(counts) + 1, generator=generator).int()
    table = torch.full((len(counts), max(*counts, 1)), 10**6, dtype=torch.int32)
    cache = torch.full((len(order), case.page, 1, 656), 0xFF, dtype=torch.uint8)  # NaN in every dtype
    made = wa.LatentPages.of_bytes(cache, table, torch.tensor(case.lengths, dtype=torch.int32))
    latents, first = made.k_pages.view(torch.uint8), 0
    scale = made.k_scale if per == 128 else torch.full(made.k_pages.shape[:3], float("nan"))
    one = torch.tensor(0.01) if per == "tensor" else torch.ones(())
    for b, (length, count) in enumerate(zip(case.lengths, counts, strict=True)):
        own = table[b, :count] = order[first : first + count]
        first += count
        for at in range(length):
            page, row = int(own[at // case.page]), at % case.page
            x = torch.randn(1, DIM, generator=generator) * 2.0 ** -(at % 3)
            made.rope[page, row] = x[:, DIM_V:].bfloat16()
            stored = wa.quantize(x[:, :DIM_V], dtype, per=per or "tensor", scale=None if per in (128, "token") else one)
            latents[page, row] = stored.values.view(torch.uint8)
            if per in (128, "token"):
                scale[page, row] = stored.scale
    values = made.k_pages if dtype == torch.float8_e4m3fn else made.k_pages.view(dtype)
    given = {128: scale, "token": scale, "tensor": one, None: None}[per]
    return wa.LatentPages(values, made.rope, table, made.lengths, scale=given)


def with_narrow_rope(kv: wa.LatentPages) -> wa.LatentPages:
    """The same cache with rotary parts of 8 bits, divided by the latents' scale, as engines keep them (`fp8`)."""
    scale = torch.ones(()) if kv.k_scale is None else kv.k_scale
    rope = saturated(kv.rope.float() / (scale[..., None] if scale.ndim else scale), kv.k_pages.dtype)
    return wa.LatentPages(kv.k_pages, rope, kv.block_table, kv.lengths, scale=kv.k_scale)


def run(case: Latent, kv: wa.LatentPages, programs: int = 3, kernel=None, **options: object) -> Ran:
    """Simulate a case with `programs` CTAs; outputs start as NaN."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    q = torch.randn(len(case.lengths), case.tokens, case.heads, DIM, generator=generator).bfloat16()
    sinks = torch.randn(case.heads, generator=generator) if case.sinks else None
    call = Call(q, kv.k_pages, kv.v_pages, kv, case.mask, case.score, sinks, SCALE, True, None, "simulate:sm90")
    ready = validate(call)
    out = torch.full((*q.shape[:3], DIM_V), float("nan"), dtype=q.dtype)
    lse = torch.full(ready.lse_shape, float("nan"))
    terms = PlanOptions(batch_invariant=case.invariant)
    choice = choose(ready.problem, ARCHS["sm90"], options=terms, swap_ab=case.swap_ab)
    choice = replace(choice, config=with_fields(choice.config, dict(case.config)))
    step, *after = list_launches(ready, Operands(q, kv.k_pages, kv.v_pages, out, lse, sinks), kv, choice)
    step.args["workspace"].o.fill_(float("nan"))
    step.args["workspace"].denominators.fill_(UNWRITTEN)
    compiled = built(step) if kernel is None else kernel(built(step))
    report = simulate(compiled, (programs,), step.args, **options)
    for combine in after:
        report.findings += simulate(built(combine), combine.grid, combine.args, **options).findings
    tail = {"mask": case.mask, "score": case.score, "sinks": sinks, "scale": SCALE}
    want, want_lse = reference(q, kv.k_pages, kv.v_pages, sequence=kv, **tail)
    tickets = step.args["workspace"].tickets[:-1]
    return Ran(report, out, lse, error(out.float(), want.float()), error(lse, want_lse), tickets)


def check(
    case: Latent, per: str | int | None = 128, programs: int = 3, narrow: bool = False, **options: object
) -> Tensor:
    """Right and without findings; `narrow`: with rotary parts of 8 bits."""
    kv = pages_of(case, per)
    ran = run(case, with_narrow_rope(kv) if narrow else kv, programs, **options)
    assert ran.report.clean, ran.report
    assert ran.out_error < 2e-2 and ran.lse_error < 1e-2
    return ran.out


CASES = {
    "one": Latent((200, 33), page=64),
    "mixed-causal-4": Latent((130, 0, 64, 5, 200), page=64, tokens=4, mask=Causal()),
    "group-128": Latent((130, 3), page=32, heads=128),
    "window-sinks": Latent((300, 40), page=16, tokens=2, mask=SlidingWindow(70), sinks=True),
    "soft-cap": Latent((130, 70), page=64, score=SoftCap(3.0)),
    "small-pages": Latent((70, 41), page=8, heads=40),
    "invariant": Latent((300, 70), page=64, invariant=True, config=(("schedule.unit", 1),)),
}


@pytest.mark.parametrize(
    ("name", "schedule", "seed"), in_turn(CASES, ("small-pages",), SCHEDULES, each=5)
)
def test_right_and_without_findings(name, schedule, seed):
    check(CASES[name], schedule=schedule, seed=seed)


@pytest.mark.parametrize("per", PER)
def test_scales(per):
    check(Latent((70, 130), page=64, heads=24), per)


@pytest.mark.full
@pytest.mark.parametrize("per", drawn(["tensor", "token", None], ["token"]))
def test_rotary_parts_of_8_bits(per):
    case = Latent((100, 33, 0), page=16, tokens=2, mask=Causal())
    schedules = SCHEDULES[:: 1 if per == "token" else 2]
    outs = [check(case, per, narrow=True, schedule=schedule, seed=seed) for schedule, seed in schedules]
    assert all(torch.equal(outs[0], out) for out in outs[1:])


@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 96, 1000])
def test_lengths(length):
    check(Latent((length,), page=64), programs=4)


@pytest.mark.full
def test_the_same_bits_under_every_schedule():
    outs = [check(CASES["mixed-causal-4"], programs=5, schedule=name, seed=seed) for name, seed in SCHEDULES]
    assert all(torch.equal(outs[0], out) for out in outs[1:])


@pytest.mark.full
def test_public_calls_and_bytes():
    """Twice by the public call, values of e5m2, and a plan's problem; NaN past the end of each sequence."""
    case = Latent((70, 33), page=64, tokens=2, heads=16, mask=Causal())
    q = torch.randn(2, 2, 16, DIM, generator=torch.Generator().manual_seed(3)).bfloat16()
    for dtype, per in ((torch.float8_e4m3fn, 128), (torch.float8_e5m2, "token")):
        kv = pages_of(case, per, dtype)
        found = wa.attention_paged(q, kv, mask=case.mask, scale=SCALE, backend="simulate:sm90")
        want = wa.attention_paged(q, kv, mask=case.mask, scale=SCALE)
        assert error(found.float(), want.float()) < 2e-2 and bool(want.any())


@pytest.mark.full
@pytest.mark.parametrize("narrow", [False, True])
def test_the_kernel_needs_its_synchronisation(narrow):
    case = Latent((330, 200, 40, 130, 70), page=64)
    kv, made = pages_of(case, "token" if narrow else 128), []
    kv = with_narrow_rope(kv) if narrow else kv

    def once(module, schedule) -> Report:
        options = {"schedule": schedule, "step_limit": 20_000, "first_finding": True}
        return run(case, kv, 2, kernel=lambda _: module, **options).report

    run(case, kv, 2, kernel=lambda kernel: made.append(kernel) or kernel)
    results = knocked_out(made[0], once, reason)
    assert sum(found.noticed for found in results) > 0.8 * len(results)
