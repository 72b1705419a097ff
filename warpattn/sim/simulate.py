"""simulate(): run a compiled kernel on the CPU and report what it did wrong."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from .arguments import bind, mark_preceding_writes, without_folded
from .blas import one_thread
from .errors import SimulationError
from .ir.module import Module, parse_module
from .link import link
from .machine.agents import SCHEDULES
from .machine.machine import Machine
from .report import Report
from .timing.record import Recorder, recorded
from .timing.replay import replay

_BACKENDS = {"cuda:90", "cuda:100", "hip:gfx942", "hip:gfx950"}
MAX_PROGRAMS = 1 << 16


@dataclass(frozen=True)
class DependentGrid:
    """A grid that is launched while the preceding launch still runs (programmatic dependent launch).

    running: tensors, or parts of them, that the preceding launch may still write. An access to one of their elements
    before `griddepcontrol.wait` is a race; a volatile load is allowed and returns anything.
    """

    grid: Sequence[int]
    running: Sequence[Any]


def simulate(
    kernel: Any,
    grid: Sequence[int] | DependentGrid,
    args: Mapping[str, Any],
    schedule: str = "eager",
    seed: int = 0,
    in_flight: int = 16,
    step_limit: int = 5_000_000,
    timing: bool = False,
) -> Report:
    """Run every program of `grid` and return what was found; outputs are written into the arguments.

    kernel: what `compile_for` or `triton.compile` returns, or TTGIR text. grid: one to three sizes, or `DependentGrid`
    with them and what the preceding launch may still write. args: by name, NumPy arrays or torch CPU tensors for
    pointers and descriptors (or `TensorDescriptor(tensor, box)`), numbers, None for a null pointer, tuples for tuples.
    schedule: eager, lazy, random or adversarial; (schedule, seed) repeats a run. in_flight: programs that run side by
    side. step_limit: the number of steps after which a run that does not end is stopped. timing: predict times with a
    model of the chip.

    Raises SimulationError for what cannot be run: an unknown operation, target or argument.
    """
    if schedule not in SCHEDULES:
        raise SimulationError(f"schedule is {schedule!r}; it must be one of {', '.join(SCHEDULES)}")
    running = grid.running if isinstance(grid, DependentGrid) else ()
    grid = grid.grid if isinstance(grid, DependentGrid) else grid
    shape = _sizes(grid)
    if not isinstance(args, Mapping):
        raise SimulationError(f"args is {args!r}; it must map the names of parameters to values")
    for name, number, least in (("in_flight", in_flight, 1), ("step_limit", step_limit, 1), ("seed", seed, None)):
        if not _integer(number) or (least is not None and number < least):
            raise SimulationError(f"{name} is {number!r}; it must be an integer{'' if least is None else ' from 1 on'}")
    if timing and isinstance(kernel, Module):
        raise SimulationError("timing needs a compiled kernel or its text, not a module that may have been changed")
    module = kernel if isinstance(kernel, Module) else linked(ttgir_of(kernel))
    if timing and module.num_ctas > 1:
        raise SimulationError("there is no model of the time that kernels with clusters take")
    recording = recorded(module.text) if timing else None
    machine = Machine(module if recording is None else recording.module, shape, schedule, seed)
    recorder = None if recording is None else Recorder(schedule, machine.rng, recording)
    machine.queue = recorder or machine.queue
    started = time.perf_counter()
    with np.errstate(all="ignore"), one_thread():
        values = bind(module, machine.memory, without_folded(args, getattr(kernel, "folded", {})))
        mark_preceding_writes(machine.memory, running, machine.preceding)
        machine.run(values, in_flight, step_limit)
    seconds = time.perf_counter() - started
    times = None if recorder is None else replay(recorder.chip, recorder.logs.values())
    found = machine.findings
    return Report(found.listed(), found.notes(), schedule, seed, machine.steps, seconds, times)


def _integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _sizes(grid: Any) -> tuple[int, int, int]:
    """The three sizes of a grid."""
    listed = isinstance(grid, Sequence) and not isinstance(grid, str)
    if not listed or not 1 <= len(grid) <= 3 or not all(_integer(n) and int(n) > 0 for n in grid):
        raise SimulationError(f"grid is {grid!r}; it needs one to three positive integers, such as (4, 1)")
    x, y, z, *_ = (*(int(n) for n in grid), 1, 1)
    if x * y * z > MAX_PROGRAMS:
        raise SimulationError(f"grid is {grid!r}, {x * y * z} programs; there may be {MAX_PROGRAMS} at most")
    return x, y, z


def ttgir_of(kernel: Any) -> str:
    """The TTGIR of a compiled kernel, or the text itself."""
    if isinstance(kernel, str):
        return kernel
    asm = getattr(kernel, "asm", None)
    if not isinstance(asm, Mapping) or "ttgir" not in asm:
        raise SimulationError(f"a {type(kernel).__name__} is no compiled kernel: it has no asm['ttgir']")
    return asm["ttgir"]


@lru_cache(64)
def linked(text: str) -> Module:
    """The module of a text, ready to run."""
    module = parse_module(text)
    if module.target not in _BACKENDS:
        raise SimulationError(
            f"the kernel is compiled for {module.target}; the simulator runs {', '.join(sorted(_BACKENDS))}"
        )
    return link(module)
