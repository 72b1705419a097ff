"""Every config of the Hopper kernel x every mask, score, sink, head count, length and layout x every schedule."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.cases import Case, kernel_cases
from tests.oracle import check, poisoned
from warpattn.problem import Call, validate
from warpattn.problem.operands import Operands
from warpattn.runtime.simulate import Options, traced
from warpattn.sequences import Dense

pytestmark = pytest.mark.full

DTYPES = {64: torch.bfloat16, 80: torch.float16, 128: torch.bfloat16, 256: torch.float16}
SCHEDULES = [("eager", 0), ("lazy", 0), ("adversarial", 0), *(("random", seed) for seed in range(4))]
CASES = [replace(case, batch=1) for dim, dtype in DTYPES.items() for case in kernel_cases(dim, dtype)]
# Past 2048 queries a head dim of 64 takes the config with three warpgroups.
LONG = [replace(CASES[0], seq_q=2200, seq_k=seq_k, heads_q=1, heads_kv=1, mask=mask, sinks=True)
        for seq_k in (130, 333) for mask in ("causal", "window", "prefix")]  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in dict.fromkeys([*CASES, *LONG])])
def test_values_and_no_findings(case: Case) -> None:
    x = case.build("cpu")
    call = Call(x.q, x.k, x.v, Dense(), x.mask, x.score, x.sinks, x.scale, True, None, "simulate:sm90")
    ready = validate(call)
    for schedule, seed in SCHEDULES:
        out = poisoned((*x.q.shape[:-1], x.v.shape[-1]), x.q.dtype)
        lse = poisoned((x.q.shape[0], x.q.shape[2], x.q.shape[1]), torch.float32)
        report = traced(ready, Operands(x.q, x.k, x.v, out, lse, x.sinks), Options(schedule, seed))
        assert report.clean, f"{schedule} {seed}: {report}"
        check(x, out, lse)
