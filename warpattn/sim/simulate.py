"""simulate(): runs a compiled kernel on the CPU and reports its errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .arguments import bind, mark_preceding_writes, without_folded
from .blas import one_thread
from .errors import SimulationError, of_type
from .ir.module import Module, parse_module
from .ir.placement import BLOCK_BYTES
from .link import link
from .machine.agents import SCHEDULES
from .machine.capacity import check_shared_memory
from .machine.machine import Machine
from .machine.states import states
from .options import Order, RunKeywords, RunOptions, is_integer
from .report import Report
from .sweep import orders_of, sweep
from .timing.record import Recorder, recorded
from .timing.replay import replay

if TYPE_CHECKING:
    from typing_extensions import Unpack

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
    schedules: str | Sequence[str] | None = None,
    seeds: int | Sequence[int] | None = None,
    **keywords: Unpack[RunKeywords],
) -> Report:
    """Run every program of `grid` and return what was found; outputs are written into the arguments.

    kernel: what `compile_for` or `triton.compile` returns, or TTGIR text. grid: one to three sizes, or `DependentGrid`
    with them and what the preceding launch may still write. args: by name, NumPy arrays or torch CPU tensors for
    pointers and descriptors (or `TensorDescriptor(tensor, box)`), numbers, None for a null pointer, tuples for tuples.
    schedule: eager, lazy, random or adversarial; (schedule, seed) repeats a run. schedules, seeds: run several times,
    each from the same memory, under "all" schedules, one or several, under `random` once for each of so many seeds, or
    for a list of them; findings name the schedule and seed that repeat them, and outputs are those of the first run.
    in_flight=16: programs that run side by side. step_limit=5,000,000: steps (rounds of loops, turns of
    roles) after which a run is stopped; a hundredth of it while loops change nothing but their own values.
    timing=False: predict times, of a sweep's first run, with a model of the chip. fixed_order=False: whether atomic
    additions of floats to one element that nothing orders are a race, since sums then differ from run to run.
    first_finding=False: whether a run ends at its first finding, with outputs as they are then.

    Raises SimulationError for what cannot be run: an unknown operation, target or argument.
    """
    if schedule not in SCHEDULES:
        raise SimulationError(f"schedule is {schedule!r}; it must be one of {', '.join(SCHEDULES)}")
    if not isinstance(args, Mapping):
        raise SimulationError(f"args is {args!r}; it must map the names of parameters to values")
    if not is_integer(seed):
        raise SimulationError(f"seed is {seed!r}; it must be an integer")
    swept = schedules is not None or seeds is not None
    if swept and (schedule, seed) != ("eager", 0):
        raise SimulationError(f"schedule is {schedule!r} and seed {seed}; a sweep takes schedules and seeds instead")
    single = _prepared(kernel, grid, args, RunOptions.of(keywords))
    if not swept:
        return single(Order(schedule, seed), True)
    orders = orders_of("all" if schedules is None else schedules, 1 if seeds is None else seeds)
    return sweep(orders, single, args.values())


def _prepared(
    kernel: Any, grid: Sequence[int] | DependentGrid, args: Mapping[str, Any], options: RunOptions
) -> Callable[[Order, bool], Report]:
    """Return a function that runs a launch once under an order; only the first run of several is timed."""
    running = grid.running if isinstance(grid, DependentGrid) else ()
    shape = _sizes(grid.grid if isinstance(grid, DependentGrid) else grid)
    if options.timing and isinstance(kernel, Module):
        raise SimulationError("timing needs a compiled kernel or its text, not a module that may have been changed")
    module = kernel if isinstance(kernel, Module) else linked(ttgir_of(kernel))
    if options.timing and module.num_ctas > 1:
        raise SimulationError("there is no model of the time that kernels with clusters take")
    given = without_folded(args, getattr(kernel, "folded", {}))

    def single(order: Order, first: bool) -> Report:
        recording = recorded(module.text) if first and options.timing else None
        machine = Machine(module if recording is None else recording.module, shape, order, options)
        recorder = None if recording is None else Recorder(order.schedule, machine.rng, recording)
        machine.queue = recorder or machine.queue
        started = time.perf_counter()
        with np.errstate(all="ignore"), one_thread():
            values = bind(module, machine.memory, given)
            mark_preceding_writes(machine.memory, running)
            machine.run(values)
        seconds = time.perf_counter() - started
        times = None if recorder is None else replay(recorder.chip, recorder.logs.values())
        found = machine.findings
        result = Report(found.listed(), found.notes(), *order, machine.steps, seconds, times)
        return replace(result, kernel=module.entry, grid=shape, programs=states(machine))

    return single


def _sizes(grid: Any) -> tuple[int, int, int]:
    """Return the three sizes of a grid."""
    listed = isinstance(grid, Sequence) and not isinstance(grid, (str, bytes))
    if not listed or not 1 <= len(grid) <= 3 or not all(is_integer(n) and int(n) > 0 for n in grid):
        raise SimulationError(f"grid is {grid!r}; it needs one to three positive integers, such as (4, 1)")
    x, y, z, *_ = (*(int(n) for n in grid), 1, 1)
    if x * y * z > MAX_PROGRAMS:
        raise SimulationError(f"grid is {grid!r}, {x * y * z} programs; there may be {MAX_PROGRAMS} at most")
    return x, y, z


def ttgir_of(kernel: Any) -> str:
    """Return the TTGIR of a compiled kernel, or the text itself."""
    if isinstance(kernel, str):
        return kernel
    asm = getattr(kernel, "asm", None)
    if not isinstance(asm, Mapping) or "ttgir" not in asm:
        raise SimulationError(f"{of_type(kernel)} is no compiled kernel: it has no asm['ttgir']")
    return asm["ttgir"]


@lru_cache(64)
def linked(text: str) -> Module:
    """Parse and link a text, ready to run."""
    module = parse_module(text)
    if module.target not in BLOCK_BYTES:
        raise SimulationError(
            f"the kernel is compiled for {module.target}; the simulator runs {', '.join(sorted(BLOCK_BYTES))}"
        )
    check_shared_memory(module)
    return link(module)
