"""Runs the Hopper kernels of ragged batches and paged caches in the simulator: their steps, one after the other."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget

from tests.oracle import Inputs, poisoned
from warpattn.kernels.sm90.prefill.choice import shared_out
from warpattn.kernels.sm90.prefill_varlen.config import choose
from warpattn.kernels.sm90.prefill_varlen.launch import list_launches
from warpattn.problem import Call, CheckedCall, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.launch import Choice, Launch
from warpattn.problem.operands import Operands, fitted
from warpattn.runtime.simulate import dependent
from warpattn.sim import Report, simulate
from warpattn.sim.compile import ARCHS as COMPILED
from warpattn.sim.compile import to_ttgir

MARGIN = 64  # rows, or elements of the LSE, before and after an output that must stay as they are
_built: dict[Any, Any] = {}


def kernel(step: Launch) -> Any:
    """A step's kernel down to TTGIR; each is compiled once."""
    key = (step.name, step.key)
    if key not in _built:
        _built[key] = to_ttgir(step.source(), GPUTarget(*COMPILED[step.arch]), dict(step.options))
    return _built[key]


def ready_for(x: Inputs) -> CheckedCall:
    """The checked call, as a launch would get it."""
    call = Call(x.q, x.k, x.v, x.sequence, x.mask, x.score, x.sinks, x.scale, True, None, "reference")
    return replace(validate(call), backend="simulate:sm90")


def in_parts(ready: CheckedCall, parts: int) -> Choice:
    """The choice for a call, with the keys of a tile in so many parts; with one the planner's."""
    choice = choose(ready.problem, ARCHS["sm90"])
    if parts == 1:
        return choice
    config = replace(choice.config, tiles=shared_out(choice.config.tiles))
    return replace(choice, config=config, partitions=parts)


def run(
    x: Inputs, programs: int = 3, ready: CheckedCall | None = None, attention: Any = None, parts: int = 1,
    **options: Any,
) -> tuple[Tensor, Tensor, list[Report]]:  # fmt: skip
    """(out, lse, reports); outputs lie between margins, which the run must leave alone.

    ready: checked before; attention: a changed module of the attention kernel; parts: of the keys.
    """
    ready = ready or ready_for(x)
    shape = (*x.q.shape[:-1], ready.problem.dim_v)
    around = poisoned((shape[0] + 2 * MARGIN, *shape[1:]), x.q.dtype)
    around_lse = poisoned((2 * MARGIN + torch.Size(ready.lse_shape).numel(),), torch.float32)
    out, lse = around[MARGIN:-MARGIN], around_lse[MARGIN:-MARGIN].view(ready.lse_shape)
    operands = fitted(Operands(x.q, x.k, x.v, out, lse, x.sinks))
    reports = []
    for step in list_launches(ready, operands, x.sequence, in_parts(ready, parts)):
        grid = (min(step.grid[0], programs),) if step.persistent else step.grid
        changed = attention if step.persistent else None
        reports.append(simulate(changed or kernel(step), dependent(step, grid), step.args, **options))
    for margins in (around, around_lse):
        assert margins[:MARGIN].isnan().all() and margins[-MARGIN:].isnan().all(), "neighbours are left alone"
    return out, lse, reports


def findings(reports: list[Report]) -> list[str]:
    return [str(finding) for report in reports for finding in report.findings]
