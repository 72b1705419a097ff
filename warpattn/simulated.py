"""Runs the kernel of a checked call in the simulator: `backend="simulate:sm90"`, and what the command line shows.

    Ready ─ plan, compile to TTGIR ─▶ simulate on CPU tensors ─▶ Report; findings are an error of the kernel, not of the
                                                                 caller: one AttentionError that lists them

The plan, its tile order and its arguments are those of a launch; only the number of programs is smaller, which the
kernel's scheduler allows.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpattn.check import AttentionError
from warpattn.kernels.sm90.launcher import Shape
from warpattn.launch import Operands, captured, fitted, planned, programs, without_keys
from warpattn.plan import Plan
from warpattn.problem import Ready
from warpattn.sim import Report, SimulationError, simulate
from warpattn.sim.compile import to_ttgir

__all__ = ["Options", "run", "traced"]

PROGRAMS = 4  # of the grid: enough for the dynamic scheduler to matter, few enough to be quick
_compiled: dict[Hashable, Any] = {}


class Options(NamedTuple):
    """How to simulate, see `warpattn.sim.simulate`; `programs` are those of the grid at most."""

    schedule: str = "lazy"
    seed: int = 0
    timing: bool = False
    programs: int = PROGRAMS


def run(ready: Ready, operands: Operands) -> None:
    """Compute `operands.out` (and `lse`) with the simulated kernel; AttentionError listing every finding."""
    report = traced(ready, operands)
    if not report.clean:
        head = f"the simulated {ready.backend.partition(':')[2]} kernel has {len(report.findings)} findings"
        raise AttentionError(*(f"{head}: {finding}" for finding in report.findings))


def traced(ready: Ready, operands: Operands, options: Options = Options()) -> Report:  # noqa: B008  immutable
    """Simulate the kernel of a call; outputs are written as a launch would, findings are in the report."""
    if ready.problem.seq_k == 0 or operands.out.numel() == 0:
        without_keys(operands)
        return Report(schedule=options.schedule, seed=options.seed)
    chosen, fitting = planned(ready.problem), fitted(operands)
    tensors = tuple(x.detach() for x in captured(ready))
    mask = ready.mask.tensors
    p = ready.problem
    group = p.heads_q // p.heads_kv
    shape = Shape(p.seq_q, p.seq_k, p.heads_q, group, chosen.m_tiles, chosen.heads, chosen.section)
    args = {
        "q_desc": fitting.q, "k_desc": fitting.k, "v_desc": fitting.v, "o_desc": fitting.out,
        "lse_ptr": fitting.lse, "sinks_ptr": fitting.sinks, "counter_ptr": torch.zeros(1, dtype=torch.int32),
        "scale": ready.scale, "shape": shape.values(), "mask_args": _flat(tensors[: len(mask)]),
        "score_args": _flat(tensors[len(mask) :]),
    }  # fmt: skip
    grid = min(chosen.grid, max(1, options.programs))
    try:
        report = simulate(_kernel(chosen, ready), (grid,), args, options.schedule, options.seed, timing=options.timing)
    except SimulationError as error:
        raise AttentionError(f"the kernel cannot be simulated: {error}") from error
    if fitting.out is not operands.out:
        operands.out.copy_(fitting.out)
    return report


def _kernel(chosen: Plan, ready: Ready) -> Any:
    """The plan's kernel down to TTGIR, from memory or the compiler."""
    mask, score = programs(ready)
    p = chosen.problem
    key = (chosen.config, mask.key, None if score is None else score.key, p.has_sinks, p.has_lse)
    if key not in _compiled:
        try:
            from warpattn.kernels.sm90 import build
        except ImportError as error:
            raise AttentionError(f"the simulator needs Triton to compile the kernel: {error}") from error
        source = build.prefill_source(chosen.config, mask, score, p.has_sinks, p.has_lse)
        _compiled[key] = to_ttgir(source, build.TARGET, build.OPTIONS)
    return _compiled[key]


def _flat(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Pointer, sizes and strides of every captured tensor."""
    return tuple(value for x in tensors for value in (x, *x.shape, *x.stride()))
