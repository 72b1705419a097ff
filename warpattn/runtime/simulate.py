"""Runs the kernels of a checked call in the simulator: `backend="simulate:sm90"`, and what the command line shows.

    Ready ─ steps, compiled to TTGIR ─▶ simulate on CPU tensors ─▶ Report; findings are an error of the kernel, not of
                                                                   the caller: one AttentionError that lists them

Plan, tile order and arguments are those of a launch; only the number of programs of a persistent kernel is smaller,
which its scheduler allows.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from warpattn.errors import AttentionError
from warpattn.problem import Ready
from warpattn.problem.operands import Operands, fitted, without_keys
from warpattn.problem.step import Step
from warpattn.runtime.kernel_cache import require_triton
from warpattn.runtime.plan import steps
from warpattn.sequences import Dense, Sequence
from warpattn.sim import Report, SimulationError, simulate
from warpattn.sim.compile import ARCHS, to_ttgir

__all__ = ["Options", "launch", "run", "traced"]

PROGRAMS = 4  # of the grid of a persistent kernel: enough for its scheduler to matter, few enough to be quick
DENSE = Dense()
_compiled: dict[Hashable, Any] = {}


class Options(NamedTuple):
    """How to simulate, see `warpattn.sim.simulate`; `programs` are those of a persistent kernel's grid at most."""

    schedule: str = "lazy"
    seed: int = 0
    timing: bool = False
    programs: int = PROGRAMS


def run(ready: Ready, operands: Operands, sequence: Sequence = DENSE) -> None:
    """Compute `operands.out` (and `lse`) with the simulated kernels; AttentionError listing every finding."""
    report = traced(ready, operands, sequence=sequence)
    if not report.clean:
        head = f"the simulated {_arch(ready)} kernel has {len(report.findings)} findings"
        raise AttentionError(*(f"{head}: {finding}" for finding in report.findings))


def traced(ready: Ready, operands: Operands, options: Options = Options(), sequence: Sequence = DENSE) -> Report:  # noqa: B008  immutable
    """Simulate the kernels of a call; outputs are written as a launch would write them.

    The report is that of the launch with the most to do, with the findings of all.
    """
    if ready.problem.seq_k == 0 or operands.out.numel() == 0:
        without_keys(operands)
        return Report(schedule=options.schedule, seed=options.seed)
    fitting = fitted(operands)
    reports = [launch(step, options) for step in steps(ready, fitting, sequence)]
    if fitting.out is not operands.out:
        operands.out.copy_(fitting.out)
    main = max(reports, key=lambda report: report.steps)
    main.findings = [finding for report in reports for finding in report.findings]
    return main


def _arch(ready: Ready) -> str:
    return ready.backend.partition(":")[2]


def launch(step: Step, options: Options) -> Report:
    """Simulate one launch."""
    grid = step.grid
    if step.persistent:
        grid = (min(grid[0], max(1, options.programs)), *grid[1:])
    try:
        return simulate(_kernel(step), grid, step.args, options.schedule, options.seed, timing=options.timing)
    except SimulationError as error:
        raise AttentionError(f"the kernel cannot be simulated: {error}") from error


def _kernel(step: Step) -> Any:
    """A step's kernel down to TTGIR, from memory or the compiler."""
    key = (step.name, step.arch, step.key)
    if key not in _compiled:
        require_triton()
        from triton.backends.compiler import GPUTarget

        _compiled[key] = to_ttgir(step.source(), GPUTarget(*ARCHS[step.arch]), dict(step.options))
    return _compiled[key]
