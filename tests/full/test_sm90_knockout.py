"""Hopper prefill with a tile's keys in parts, and its second look at tiles that met NaN: synchronisation is needed.

`make test` takes the operations of the plain kernel out. Here are those of the scheduler of parts and of recompute.py;
of the backward the numbers of its barriers and waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.eight_bit import in_eight_bits
from tests.oracle import Inputs, poisoned
from tests.sim import backward
from tests.sim.knocking import ALONE, SM90_PREFILL, WIDENED, knocked_out, reviewed
from tests.sim.machine.findings.test_knockout import FIRST, TURN
from warpattn.kernels.sm90.prefill.choice import choose, shared_out
from warpattn.kernels.sm90.prefill.config import choose_config
from warpattn.kernels.sm90.prefill.launch import arrange, list_launches
from warpattn.masks import Causal, Mask, Padding, SlidingWindow
from warpattn.problem import Call, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.backward import fitted_gradients
from warpattn.problem.launch import Launch
from warpattn.problem.operands import Operands, is_masked
from warpattn.runtime.simulate import Options, dependent, run_launch
from warpattn.runtime.simulate import _kernel as compiled
from warpattn.sequences import Dense
from warpattn.sim import KnockOut, Report, knock_out, miscount, simulate
from warpattn.sim.saved import SavedMemory

pytestmark = pytest.mark.full

EMPTY = ("ttng.init_barrier", "mbarrier.init(bars.index(i), count=1)", "barriers of empty slots, as above")
reason = reviewed([*SM90_PREFILL, FIRST, TURN, ALONE, EMPTY, WIDENED])


@dataclass(frozen=True)
class Case:
    mask: Mask
    parts: int
    queries: int
    keys: int
    special: range = range(0)  # keys whose values are NaN
    dim: int = 64
    stored: tuple[str, ...] = ()  # what scales of k and v belong to, if these have 8 bits, and of q if it has, too

    def launch(self) -> Launch:
        """Of one head."""
        q, k, v = (torch.randn(1, rows, 1, self.dim).half() for rows in (self.queries, self.keys, self.keys))
        v[:, list(self.special)] = float("nan")
        if self.stored:
            wide = Inputs(*(x.bfloat16() for x in (q, k, v)))
            return self.launch_of_8_bits(in_eight_bits(wide, self.stored, torch.float8_e4m3fn))
        ready = validate(Call(q, k, v, Dense(), self.mask, None, None, None, True, None, "simulate:sm90"))
        problem = ready.problem
        config, _ = choose_config(problem.element, problem.dim_qk, problem.dim_v, problem.seq_q, is_masked(problem))
        config = config if self.parts == 1 else shared_out(config)
        choice = arrange(problem, ARCHS["sm90"], config, ("given",), self.parts)
        out, lse = torch.full(q.shape, float("nan"), dtype=q.dtype), torch.full(ready.lse_shape, float("nan"))
        return list_launches(ready, Operands(q, k, v, out, lse, None), Dense(), choice)[0]

    def launch_of_8_bits(self, x: Inputs) -> Launch:
        """The same, after the launch that transposes values of products."""
        call = Call(x.q, x.k, x.v, x.sequence, self.mask, None, None, None, True, None, "simulate:sm90")
        ready = validate(call)
        out, lse = poisoned(x.q.shape, ready.problem.dtype), poisoned(ready.lse_shape, torch.float32)
        choice = choose(ready.problem, ARCHS["sm90"])
        *before, step = list_launches(ready, Operands(x.q, x.k, x.v, out, lse, None), x.sequence, choice)
        assert all(run_launch(launch, Options()).clean for launch in before)
        return step


PADDED = Causal() & Padding(torch.tensor([300]))
CASES = {
    "split": Case(Causal(), 2, 1100, 1100),  # the first rows see one key tile: a part has none
    "recompute": Case(PADDED, 1, 400, 320, range(300, 320)),
    "recompute, exact": Case(PADDED, 1, 400, 320, range(300, 320), 80),
    "exact, output in blocks": Case(Causal(), 1, 700, 700, dim=160),
    "recompute, products": Case(PADDED, 1, 400, 320, range(300, 320), stored=("head",) * 3),
    "recompute, converted": Case(PADDED, 1, 400, 320, range(300, 320), stored=("token",) * 2),
}


backward_reason = reviewed([
    ("ttng.init_barrier", "empty_arrivals(topology, \"K\"), 1", "keys are loaded once"),
    ("ttng.init_barrier", "empty_arrivals(topology, \"V\"), 1", "values are loaded once"),
])  # fmt: skip


def backward_launch() -> Launch:
    """Of a mask under which no row sees the first keys, after the launches before it."""
    case = backward.Case(400, 740, mask=Causal() & SlidingWindow(200))
    inputs = case.inputs()
    x = fitted_gradients(backward.operands(case, inputs, backward.gradients(case, inputs, torch.float64)))
    for launch in backward.launches(case, x, inputs):
        if launch.name == "sm90.backward":
            return launch
        assert run_launch(launch, Options()).clean
    raise AssertionError("no launch of the backward")


def changed(name: str, change: Any) -> list[KnockOut]:
    launch = backward_launch() if name == "backward" else CASES[name].launch()
    before = SavedMemory(launch.args.values())
    grid = (1,) if launch.persistent else launch.grid

    def once(module: Any, schedule: str) -> Report:
        report = simulate(module, dependent(launch, grid), launch.args, schedule, step_limit=8_000, first_finding=True)
        before.restore()
        return report

    def of_the_case(op: Any) -> bool:
        """The second pass runs in its own cases alone."""
        files = ("recompute.py",) if name.startswith("recompute") else ("recompute.py", "nonfinite.py")
        return any(frame.file.endswith(files) for frame in op.frames) == name.startswith("recompute")

    why = backward_reason if name == "backward" else reason
    return knocked_out(compiled(launch), once, why, change=lambda kernel, run: change(kernel, run, only=of_the_case))


@pytest.mark.parametrize("name", CASES)
def test_every_synchronisation_is_needed(name: str) -> None:
    assert len(changed(name, knock_out)) > 5


@pytest.mark.parametrize("name", [*CASES, "backward"])
def test_every_number_of_a_barrier_matters(name: str) -> None:
    assert len(changed(name, miscount)) > 5
