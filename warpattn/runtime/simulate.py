"""Runs the kernels of a checked call in the simulator: `backend="simulate:sm90"`, and what the command line shows.

    CheckedCall ─ launches, compiled to TTGIR ─▶ simulate on CPU tensors ─▶ Report

Findings are errors of the kernel, not of the caller: one AttentionError lists them. The launches and their arguments
are the same as on a card; only a persistent kernel gets fewer programs, which its scheduler allows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from threading import Lock
from typing import Any, NamedTuple

from torch import Tensor

from warpattn.errors import AttentionError, many
from warpattn.problem import CheckedCall
from warpattn.problem.arch import triton_target
from warpattn.problem.backward import CheckedBackward, Gradients, fitted_gradients, write_back
from warpattn.problem.launch import Launch
from warpattn.problem.operands import Operands, fitted, hand_over, without_keys
from warpattn.runtime.compiler import refusals_named
from warpattn.runtime.kernel_cache import require_triton
from warpattn.runtime.launches import list_launches
from warpattn.runtime.training.plan import list_backward_launches
from warpattn.sequences import Dense, Sequence
from warpattn.sim import DependentGrid, Finding, Report, SimulationError, simulate
from warpattn.sim.compile import to_ttgir

PROGRAMS = 4  # programs of a persistent kernel: enough for its scheduler to matter, few enough to be quick
DENSE = Dense()
TICKETS = "tickets"  # field of an argument that a launch leaves at 0, as its tile counter
_compiled: dict[Hashable, Any] = {}
_compiling = Lock()  # Python's own parser, which Triton calls, fails in two threads at once


class Options(NamedTuple):
    """How to simulate, see `warpattn.sim.simulate`; `programs`: most programs of a persistent kernel."""

    schedule: str = "lazy"
    seed: int = 0
    timing: bool = False
    programs: int = PROGRAMS


def run(checked: CheckedCall, operands: Operands, sequence: Sequence = DENSE) -> None:
    """Compute `operands.out` (and `lse`) with the simulated kernels; raises AttentionError listing every finding."""
    _raise_findings(traced(checked, operands, sequence=sequence), _arch(checked))


def traced(
    checked: CheckedCall,
    operands: Operands,
    options: Options = Options(),  # noqa: B008  immutable
    sequence: Sequence = DENSE,
) -> Report:
    """Simulate the kernels of a call; outputs are written as a launch would write them.

    Returns the report of the launch with the most steps, with the findings of all.
    """
    if checked.problem.seq_k == 0 or operands.out.numel() == 0:
        without_keys(operands)
        return Report(schedule=options.schedule, seed=options.seed)
    fitting = fitted(operands)
    report = _longest([run_launch(launch, options) for launch in list_launches(checked, fitting, sequence)])
    hand_over(fitting, operands)
    return report


def run_backward(checked: CheckedBackward, x: Gradients, sequence: Sequence = DENSE) -> None:
    """Compute the gradients of `x` with the simulated kernels; raises AttentionError listing every finding."""
    _raise_findings(traced_backward(checked, x, sequence=sequence), f"{_arch(checked.forward)} backward")


def traced_backward(
    checked: CheckedBackward,
    x: Gradients,
    options: Options = Options(),  # noqa: B008  immutable
    sequence: Sequence = DENSE,
) -> Report:
    """Simulate the kernels of a backward, as `traced` does those of a forward."""
    fitting = fitted_gradients(x)
    launches = list_backward_launches(checked, fitting, sequence)
    report = _longest([run_launch(launch, options) for launch in launches])
    write_back(fitting, x)
    return report


def _longest(reports: list[Report]) -> Report:
    """Return the report with the most steps, with the findings of all."""
    main = max(reports, key=lambda report: report.steps)
    main.findings = [finding for report in reports for finding in report.findings]
    return main


def _raise_findings(report: Report, kernel: str) -> None:
    if not report.clean:
        head = f"the simulated {kernel} kernel has {many(len(report.findings), 'finding')}"
        raise AttentionError(*(f"{head}: {finding}" for finding in report.findings))


def _arch(checked: CheckedCall) -> str:
    return checked.backend.partition(":")[2]


def run_launch(launch: Launch, options: Options) -> Report:
    """Simulate one launch. Its counters must be 0 at the end; with other findings that is not looked at."""
    grid = launch.grid
    if launch.persistent:
        grid = (min(grid[0], max(launch.persistent, options.programs)), *grid[1:])
    ordered = dependent(launch, grid)
    try:
        report = simulate(_kernel(launch), ordered, launch.args, options.schedule, options.seed, timing=options.timing)
    except SimulationError as error:
        raise AttentionError(f"the kernel cannot be simulated: {error}") from error
    if report.clean:
        report.findings += [_left(launch, name, cells) for name, cells in _counters(launch).items() if cells.any()]
    return report


def _counters(launch: Launch) -> dict[str, Tensor]:
    """The memory of a launch that is 0 before it and after it, by the names of the arguments."""
    found = {f"{name}.{TICKETS}": value.tickets for name, value in launch.args.items() if hasattr(value, TICKETS)}
    if launch.tile_counter is not None:
        found[launch.tile_counter] = launch.args[launch.tile_counter]
    return found


def _left(launch: Launch, name: str, cells: Tensor) -> Finding:
    at = int(cells.flatten().nonzero()[0])
    text = f"{launch.name} leaves {int(cells.flatten()[at])} in element {at} of {name}, where the next launch needs 0"
    return Finding("NotReset", text, buffer=name)


def dependent(launch: Launch, grid: tuple[int, ...]) -> tuple[int, ...] | DependentGrid:
    """Return the grid to simulate. With PDL the preceding kernel may still be writing any of the launch's tensors: a
    call promises nothing else."""
    return DependentGrid(grid, tensors_in(launch.args.values())) if launch.pdl else grid


def tensors_in(args: Iterable[Any]) -> list[Tensor]:
    """Return all tensors among arguments, also in tuples."""
    found = []
    for x in args:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, tuple):
            found += tensors_in(x)
    return found


def run_alone(launch: Launch) -> None:
    """Simulate a launch that is no part of a call; raises AttentionError listing every finding."""
    _raise_findings(run_launch(launch, Options()), launch.name)


def _kernel(launch: Launch) -> Any:
    """Compile a launch's kernel to TTGIR, once per process."""
    key = (launch.name, launch.arch, launch.key)
    if key not in _compiled:
        require_triton()
        with _compiling, refusals_named(launch.name):
            if key not in _compiled:
                _compiled[key] = to_ttgir(launch.source(), triton_target(launch.arch), dict(launch.options))
    return _compiled[key]
