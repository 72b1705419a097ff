"""Decode of latent attention on Blackwell in the simulator: right values, no findings, the public calls, knock-outs."""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from tests.drawn import drawn, in_turn
from tests.sim.knocking import AFTER, SHARED, knocked_out, reviewed
from tests.sim.sm90.decode import built
from tests.sim.sm90.mla import DIM_V, SCALE, Latent, tensors
from tests.sim.sm90.prefill import error
from warpattn.kernels.sm100.mla.config import choose_latent
from warpattn.kernels.sm100.mla.launch import latent_launches
from warpattn.masks import Causal, CustomMask, SlidingWindow
from warpattn.problem import validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.launch import Launch, PlanOptions
from warpattn.problem.operands import Operands
from warpattn.scores import SoftCap
from warpattn.sim import Report, simulate
from warpattn.sim.memory.tensor_memory import TensorBuffer

SCHEDULES = [("eager", 0), ("lazy", 0), ("adversarial", 0), ("random", 0), ("random", 1)]
MIXED = (130, 0, 64, 5, 200)

CASES = {
    "dense": Latent((130, 130)),
    "mixed-causal-4": Latent(MIXED, page=64, tokens=4, mask=Causal()),
    "group-128": Latent((130, 3), page=64, heads=128),
    "group-128-causal-2": Latent((100, 40), page=16, heads=128, tokens=2, mask=Causal()),
    "window-sinks": Latent((300, 40), page=16, tokens=2, mask=SlidingWindow(70), sinks=True),
    "soft-cap-fp16": Latent((130, 70), page=64, score=SoftCap(3.0), dtype=torch.float16),
    "odd-group-16-tokens": Latent((70, 90), page=128, heads=5, tokens=16, mask=Causal()),
    "copied": Latent((130, 5), page=3, tokens=2, mask=Causal()),
    "by-head": Latent((100,), mask=CustomMask(lambda b, h, q, k: (k + h) % 3 != 0)),
}


@dataclass(frozen=True)
class Prepared:
    """A case ready to run: its launches, results that start as NaN, and what they should be."""

    steps: tuple[Launch, ...]
    out: torch.Tensor
    lse: torch.Tensor
    want: tuple[torch.Tensor, torch.Tensor]

    def check(self, dtype: torch.dtype) -> None:
        assert error(self.out.float(), self.want[0].float()) < (2e-2 if dtype == torch.bfloat16 else 3e-3)
        assert error(self.lse, self.want[1]) < 1e-4


def prepared(case: Latent, parts: int = 1) -> Prepared:
    """The launches of a case with its keys in `parts`."""
    x = tensors(case)
    ready = validate(x.call(case), read_values=False)
    out = torch.full((*x.q.shape[:3], DIM_V), float("nan"), dtype=case.dtype)
    lse = torch.full(ready.lse_shape, float("nan"))
    choice = choose_latent(ready.problem, ARCHS["sm100"], PlanOptions(batch_invariant=True))
    tiles, *rest = choice.grid
    config = replace(choice.config, splitk_partitions=parts)
    choice = replace(choice, config=config, grid=(tiles * parts, *rest), partitions=parts)
    operands = Operands(x.q, x.k, x.v, out, lse, x.sinks)
    launches = latent_launches(ready, operands, x.sequence, choice)
    return Prepared(launches, out, lse, x.expected(case))


def check(case: Latent, parts: int = 1, **options: Any) -> Prepared:
    """Run a case; right and without findings."""
    ran = prepared(case, parts)
    for step in ran.steps:
        report = simulate(built(step), step.grid, step.args, **options)
        assert report.clean, report
    ran.check(case.dtype)
    return ran


DRAWN = ("mixed-causal-4",)  # dense ones are below


@pytest.mark.parametrize(("name", "schedule", "seed"), in_turn(CASES, DRAWN, SCHEDULES, each=5))
def test_right_and_without_findings(name, schedule, seed):
    check(CASES[name], schedule=schedule, seed=seed)


NAMES, PARTS = ("mixed-causal-4", "window-sinks", "group-128"), (2, 4, 16)


@pytest.mark.parametrize(("name", "parts"), drawn(product(NAMES, PARTS), [("mixed-causal-4", 4)]))
def test_parts(name, parts):
    """More parts than key tiles leave some without keys."""
    check(CASES[name], parts, schedule="lazy")


@pytest.mark.parametrize("length", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("page", drawn([0, 64], [64]))
def test_lengths(page, length):
    check(Latent((length,), page=page), 2 if length > 64 else 1)


@pytest.mark.full
@pytest.mark.parametrize("page", drawn([1, 16, 48, 128, 512], [48]))
def test_pages(page):
    check(Latent((130, 0, 40), page=page, tokens=2, mask=Causal()), schedule="adversarial")


def test_the_output_is_rescaled_only_where_the_maximum_moves(monkeypatch):
    """Scores that grow along the walk, from the last key tile to the first, by a rotary column: eight stores a tile."""
    written = []
    write = TensorBuffer.write
    monkeypatch.setattr(TensorBuffer, "write", lambda *args: (written.append(0), write(*args))[1])
    counts = []
    for slope in (0.0, 1.0):
        x = tensors(Latent((256,)))
        x.q[..., 560] = 4.0
        x.k[..., 560] = slope * torch.arange(256, 0, -1)[None, :, None]
        written.clear()
        out = wa.attention(x.q, x.k, x.v, scale=SCALE, backend="simulate:sm100")
        assert error(out.float(), x.expected(Latent((256,)))[0].float()) < 2e-2
        counts.append(len(written))
    assert counts[1] - counts[0] == 8 * 3


@pytest.mark.full
def test_nothing_visible():
    ran = check(Latent((100, 0), page=64, mask=CustomMask(lambda b, h, q, k: k < 0)), 2)
    assert not ran.out.any() and torch.isneginf(ran.lse).all()


def test_the_same_bits_under_every_schedule():
    outs = [check(CASES["mixed-causal-4"], schedule=schedule, seed=seed).out for schedule, seed in SCHEDULES]
    assert all(torch.equal(outs[0], out) for out in outs[1:])


@pytest.mark.full
@pytest.mark.parametrize(("keys", "page"), drawn(product((70, 1100), (0, 64)), [(1100, 0)]))
def test_public_calls(page, keys):
    """1100 keys are split, and without sinks and LSE for the kernel that makes the parts."""
    case = Latent((keys, keys), page=page, tokens=2, mask=Causal(), sinks=True)
    x = tensors(case)
    tail = {"mask": case.mask, "sinks": x.sinks, "scale": SCALE, "return_lse": True, "backend": "simulate:sm100"}
    out, lse = wa.attention_paged(x.q, x.sequence, **tail) if page else wa.attention(x.q, x.k, x.v, **tail)
    want, want_lse = x.expected(case)
    assert error(out.float(), want.float()) < 2e-2 and error(lse, want_lse) < 1e-4


def test_how_keys_are_split():
    case = Latent((16384,))
    problem = validate(tensors(case).call(case), read_values=False).problem
    assert choose_latent(problem, ARCHS["sm100"]).grid == (16, 1, 1)
    assert choose_latent(problem, ARCHS["sm100"], PlanOptions(batch_invariant=True)).grid == (1, 1, 1)


# Operation, what stands in one of its lines of Python, why it can go.
REDUNDANT = [
    (AFTER, "await_signal(ctx.bars.q, 0)", SHARED),
    ("ttng.fence_async_shared", "    fence_async_shared()\n", "for new barriers and TMA: not modelled"),
]
reason = reviewed(REDUNDANT)


def test_every_synchronisation_is_needed():
    (step,) = prepared(Latent((330, 40), page=64)).steps

    def once(module, schedule) -> Report:
        return simulate(module, step.grid, step.args, schedule, step_limit=20_000, first_finding=True)

    results = knocked_out(built(step), once, reason)
    barriers = [found for found in results if not found.op.startswith("tcgen05.fence")]
    assert sum(found.noticed for found in barriers) > 0.8 * len(barriers)
