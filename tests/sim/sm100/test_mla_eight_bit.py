"""Decode over 8-bit latents on Blackwell in the simulator: right values, no findings, DeepSeek's bytes, knock-outs."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from tests.drawn import drawn
from tests.sim.knocking import knocked_out
from tests.sim.sm90.decode import built
from tests.sim.sm90.mla import DIM, DIM_V, SCALE, Latent
from tests.sim.sm90.prefill import error
from tests.sim.sm90.test_mla_eight_bit import CASES, PER, SCHEDULES, pages_of, with_narrow_rope
from tests.sim.sm100.test_mla import Prepared, reason
from warpattn.kernels.sm100.mla.config import choose_latent
from warpattn.kernels.sm100.mla.launch import latent_launches
from warpattn.masks import Causal
from warpattn.problem import Call, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.launch import PlanOptions
from warpattn.problem.operands import Operands
from warpattn.reference import reference
from warpattn.sim import Report, simulate


def query(case: Latent) -> torch.Tensor:
    generator = torch.Generator().manual_seed(case.seed + 1)
    return torch.randn(len(case.lengths), case.tokens, case.heads, DIM, generator=generator).bfloat16()


def prepared(case: Latent, per: str | int | None = 128, parts: int = 1, narrow: bool = False) -> Prepared:
    """The launches of a case with its keys in `parts`, and what results should be: those of latents as the kernel
    multiplies them, in bf16. `narrow`: with rotary parts of 8 bits."""
    q, kv = query(case), pages_of(case, per)
    kv = with_narrow_rope(kv) if narrow else kv
    sinks = torch.randn(case.heads, generator=torch.Generator().manual_seed(2)) if case.sinks else None
    call = Call(q, kv.k_pages, kv.v_pages, kv, case.mask, case.score, sinks, SCALE, True, None, "simulate:sm100")
    ready = validate(call)
    out, lse = torch.full((*q.shape[:3], DIM_V), torch.nan).bfloat16(), torch.full(ready.lse_shape, torch.nan)
    choice = choose_latent(ready.problem, ARCHS["sm100"], PlanOptions(batch_invariant=True))
    tiles, *rest = choice.grid
    config = replace(choice.config, splitk_partitions=parts)
    choice = replace(choice, config=config, grid=(tiles * parts, *rest), partitions=parts)
    launches = latent_launches(ready, Operands(q, kv.k_pages, kv.v_pages, out, lse, sinks), kv, choice)
    scale = torch.ones(()) if kv.k_scale is None else kv.k_scale
    latents = wa.Quantized(kv.k_pages, scale).dequantized().bfloat16()
    rope = wa.Quantized(kv.rope, scale).dequantized().bfloat16() if narrow else kv.rope
    keys = torch.cat([latents, rope], -1)
    rounded = wa.PagedKV(keys, latents, kv.block_table, kv.lengths)
    tail = {"mask": case.mask, "score": case.score, "sinks": sinks, "scale": SCALE}
    return Prepared(launches, out, lse, reference(q, keys, latents, sequence=rounded, **tail))


def check(
    case: Latent, per: str | int | None = 128, parts: int = 1, narrow: bool = False, **options: object
) -> torch.Tensor:
    """Right and without findings."""
    ran = prepared(case, per, parts, narrow)
    for step in ran.steps:
        report = simulate(built(step), step.grid, step.args, **options)
        assert report.clean, report
    ran.check(torch.bfloat16)
    return ran.out


@pytest.mark.parametrize("name", drawn(CASES, ("mixed-causal-4",)))
def test_right_and_without_findings(name):
    outs = [check(CASES[name], schedule=schedule, seed=seed) for schedule, seed in SCHEDULES]
    assert all(torch.equal(outs[0], out) for out in outs[1:])


@pytest.mark.parametrize("per", drawn(PER, [128]))
def test_scales(per):
    check(Latent((70, 130), page=64, heads=24), per, 2)


@pytest.mark.full
@pytest.mark.parametrize("per", drawn(["tensor", "token", None], ["token"]))
def test_rotary_parts_of_8_bits(per):
    case = Latent((100, 33, 0), page=16, tokens=2, mask=Causal())
    schedules = SCHEDULES[:: 1 if per == "token" else 2]
    outs = [check(case, per, 2, narrow=True, schedule=schedule, seed=seed) for schedule, seed in schedules]
    assert all(torch.equal(outs[0], out) for out in outs[1:])


@pytest.mark.parametrize("length", drawn([1, 32, 33, 64, 1000], [1, 32, 33, 64]))
def test_lengths(length):
    check(Latent((length,), page=64), parts=4 if length > 64 else 1)


@pytest.mark.full
def test_public_calls_and_bytes():
    """By the public call, values of e5m2, and keys in parts; NaN past the end of each sequence."""
    for case, dtype, per in (
        (Latent((70, 33), page=64, tokens=2, mask=Causal()), torch.float8_e4m3fn, 128),
        (Latent((1100,), page=16), torch.float8_e5m2, "token"),
    ):
        q, kv = query(case), pages_of(case, per, dtype)
        found, want = (wa.attention_paged(q, kv, mask=case.mask, scale=SCALE, backend=name)
                       for name in ("simulate:sm100", "reference"))  # fmt: skip
        assert error(found.float(), want.float()) < 2e-2 and bool(want.any())


def test_a_wrong_scale_is_seen():
    case = Latent((70,), page=64)
    q, kv = query(case), pages_of(case)
    wrong = kv.with_fields(v_scale=kv.v_scale * torch.tensor([1.0, 1.0, 1.0, 1.1]))
    found = wa.attention_paged(q, wrong, scale=SCALE, backend="simulate:sm100")
    assert error(found.float(), wa.attention_paged(q, kv, scale=SCALE).float()) > 2e-2


@pytest.mark.full
@pytest.mark.parametrize("narrow", [False, True])
def test_every_synchronisation_is_needed(narrow):
    (step,) = prepared(Latent((330, 40), page=64), "token" if narrow else 128, narrow=narrow).steps

    def once(module, schedule) -> Report:
        return simulate(module, step.grid, step.args, schedule, step_limit=20_000)

    results = knocked_out(built(step), once, reason)
    barriers = [found for found in results if not found.op.startswith("tcgen05.fence")]
    assert sum(found.noticed for found in barriers) > 0.8 * len(barriers)
