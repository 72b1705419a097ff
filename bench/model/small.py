"""Small runs of a problem's kernels in the simulator: what a CTA takes with the configuration of the whole problem."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

import warpattn as wa
from bench.cases import Case
from bench.model.problems import Problem
from warpattn.kernels.sm90.backward.launch import list_backward_launches
from warpattn.kernels.sm90.decode.launch import list_launches as decode_launches
from warpattn.kernels.sm90.prefill.launch import arrange, attention_launch
from warpattn.masks import Causal, Mask, SlidingWindow
from warpattn.problem import Call, CheckedCall, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.backward import CheckedBackward, Gradients, fitted_gradients
from warpattn.problem.launch import Choice, Launch
from warpattn.problem.operands import Operands
from warpattn.runtime import simulate as simulated
from warpattn.runtime.plan import Plan, plan
from warpattn.runtime.training.plan import plan_backward
from warpattn.sequences import Dense
from warpattn.sim.timing.replay import Timing

SM90 = ARCHS["sm90"]


def mask_of(problem: Problem) -> Mask | None:
    """The mask of a problem."""
    case = problem.case
    return SlidingWindow(case.window) if case.window else Causal() if case.causal else None


def checked(problem: Problem, device: str = "cpu") -> tuple[CheckedCall, Any]:
    """The call of a problem on empty tensors, and q, k, v."""
    case = problem.case
    dtype = getattr(torch, case.dtype)
    sizes = ((case.seq_q, case.heads_q, case.dim), (case.seq_k, case.heads_kv, case.dim),
             (case.seq_k, case.heads_kv, case.dim_v))  # fmt: skip
    q, k, v = (torch.empty(case.batch, *size, dtype=dtype, device=device) for size in sizes)
    backend = "simulate:sm90" if device == "cpu" else "auto"
    call = Call(q, k, v, Dense(), mask_of(problem), None, None, None, problem.backward, None, backend)
    return validate(call), (q, k, v)


def plan_of(problem: Problem) -> Plan:
    """The plan of a problem."""
    ready, _ = checked(problem)
    return plan_backward(ready.problem) if problem.backward else plan(ready.problem)


class Size(NamedTuple):
    """Of a small problem: query heads, rows, keys, whether it is causal; key heads; CTAs that share its keys."""

    heads: int
    rows: int
    keys: int
    causal: bool = False
    heads_kv: int = 1
    ctas: int = 1


def run(problem: Problem, choice: Choice, size: Size) -> Timing:
    """The times of a small problem with the configuration of `choice`."""
    case = replace(
        problem.case, batch=1, seq_q=size.rows, seq_k=size.keys, heads_q=size.heads, heads_kv=size.heads_kv,
        causal=size.causal, window=None,
    )  # fmt: skip
    choice = replace(choice, grid=(size.ctas,))
    options = simulated.Options(timing=True, programs=size.ctas)
    launches = _backward(Problem(case, True), choice) if problem.backward else (_forward(Problem(case), choice),)
    reports = [simulated.run_launch(launch, options) for launch in launches]
    for report in reports:
        if not report.clean:
            raise RuntimeError(str(report))
    timing = reports[len(reports) // 2].timing
    assert timing is not None
    return timing


def _forward(problem: Problem, choice: Choice) -> Launch:
    ready, (q, k, v) = checked(problem)
    q, k, v = (torch.randn(x.shape).to(x.dtype) for x in (q, k, v))
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    x = Operands(q, k, v, out, None, None)
    if choice.kernel == "decode":
        return decode_launches(ready, x, Dense(), choice)[0]
    config = replace(choice.config, split=False) if choice.config.split else choice.config
    return attention_launch(ready, x, Dense(), arrange(ready.problem, SM90, config, ("given",)))


def _backward(problem: Problem, choice: Choice) -> tuple[Launch, ...]:
    """Prepare, main kernel and finish."""
    ready, (q, k, v) = checked(problem)
    q, k, v, dout = (torch.randn(x.shape).to(x.dtype) for x in (q, k, v, q))
    out, lse = wa.attention(q, k, v, mask=mask_of(problem), return_lse=True)
    fresh = [torch.empty_like(x) for x in (q, k, v)]
    made = fitted_gradients(Gradients(q, k, v, out, lse, dout, None, None, *fresh, None))
    backward = CheckedBackward.of(ready, False)
    own = plan_backward(ready.problem).choice
    return list_backward_launches(backward, made, Dense(), replace(own, config=choice.config))


def simulated_head(seq: int) -> None:
    """Simulate one causal head of dim 128 without timing."""
    case = Case("head", 1, seq, seq, 1, 1, 128, 128, causal=True)
    choice = plan_of(Problem(case)).choice
    simulated.run_launch(_forward(Problem(case), choice), simulated.Options())
