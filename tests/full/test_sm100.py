"""The Blackwell kernel of two query tiles x every mask, score, sink, head count, length and layout x every schedule."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.cases import Case, kernel_cases
from tests.oracle import check, poisoned
from warpattn.kernels.sm100.prefill_2q.config import choose_2q
from warpattn.kernels.sm100.select import launches_of_choice
from warpattn.problem import Call, validate
from warpattn.problem.operands import Operands, fitted
from warpattn.runtime.simulate import Options, run_launch
from warpattn.sequences import Dense

pytestmark = pytest.mark.full

DTYPES = {64: torch.bfloat16, 80: torch.float16, 96: torch.bfloat16, 128: torch.float16}
SCHEDULES = [("eager", 0), ("lazy", 0), ("adversarial", 0), *(("random", seed) for seed in range(4))]
CASES = [replace(case, batch=1) for dim, dtype in DTYPES.items() for case in kernel_cases(dim, dtype)]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in dict.fromkeys(CASES)])
def test_values_and_no_findings(case: Case) -> None:
    x = case.build("cpu")
    call = Call(x.q, x.k, x.v, Dense(), x.mask, x.score, x.sinks, x.scale, True, None, "simulate:sm100")
    ready = validate(call)
    for schedule, seed in SCHEDULES:
        out = poisoned((*x.q.shape[:-1], x.v.shape[-1]), x.q.dtype)
        lse = poisoned((x.q.shape[0], x.q.shape[2], x.q.shape[1]), torch.float32)
        operands = fitted(Operands(x.q, x.k, x.v, out, lse, x.sinks))
        (step,) = launches_of_choice(ready, operands, Dense(), choose_2q(ready.problem))
        report = run_launch(step, Options(schedule, seed))
        assert report.clean, f"{schedule} {seed}: {report}"
        if operands.out is not out:
            out.copy_(operands.out)
        check(x, out, lse)
