"""launches(): every `kernel[grid](…)` of Triton and Gluon inside it runs in the simulator.

    with launches("sm100", seeds=20) as runs:
        my_program()
    assert runs.clean, runs

Triton's own binder specialises the arguments, so the simulated kernel is the one that a launch on that chip compiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, cast
from unittest import mock
from weakref import WeakKeyDictionary

from ..compile import Compiled, check_arch, to_ttgir
from ..memory.findings import Finding, many
from ..page import save
from ..report import Report
from ..simulate import simulate
from ..sweep import orders_of
from .cuda_names import cuda_on_cpu
from .driver import SimulatedDriver, untimed
from .values import check_addresses, simulated_arguments

_compiled: WeakKeyDictionary[Any, dict[Any, Compiled]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Launched:
    """One launch: its kernel's name, its grid, and the report of its runs."""

    kernel: str
    grid: tuple[int, ...]
    report: Report

    @property
    def reports(self) -> tuple[Report, ...]:
        """A report for each schedule and seed."""
        return self.report.runs

    @property
    def findings(self) -> list[Finding]:
        """Each fault once, with the first schedule and seed that show it, and its number of runs."""
        return self.report.findings

    def __str__(self) -> str:
        grid = ", ".join(map(str, self.grid))
        head = f"{self.kernel}[{grid}]: {many(len(self.findings), 'finding')} in {many(len(self.reports), 'run')}"
        return "\n".join((head, *(f"  {finding}" for finding in self.findings)))


@dataclass
class Runs:
    """The launches so far."""

    arch: str
    schedules: str | Sequence[str] = "all"
    seeds: int | Sequence[int] = 1
    timing: bool = False
    launched: list[Launched] = field(default_factory=list)

    @property
    def findings(self) -> list[Finding]:
        return [finding for launch in self.launched for finding in launch.findings]

    @property
    def clean(self) -> bool:
        return not self.findings

    def save_report(self, path: str | PathLike[str]) -> None:
        """Write findings, source lines, barriers and last operations of all launches: as .json or as one .html page."""
        save([launch.report for launch in self.launched], path)

    def __str__(self) -> str:
        if not self.launched:
            return f"no kernel was launched on the simulated {self.arch}"
        return "\n".join(map(str, self.launched))


@contextmanager
def launches(
    arch: str, *, schedules: str | Sequence[str] = "all", seeds: int | Sequence[int] = 1, timing: bool = False
) -> Iterator[Runs]:
    """Run the launches of Triton and Gluon kernels in the simulator instead of on a card.

    arch: sm90, sm100, sm103, gfx942 or gfx950. schedules: "all", one or several: each launch runs once under each,
    under "random" once for each of `seeds` (a number or a list), always from the same memory; the first run's results
    stay. timing: predict times of the first run. Arguments are torch tensors on the CPU (a program's "cuda" means the
    CPU here), NumPy arrays and numbers; autotuners take their first configuration, and benchmarks run a function
    once.

    Raises SimulationError for an unknown chip or schedule, and from the launch for what cannot be simulated.
    """
    from triton import testing
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    check_arch(arch)
    orders_of(schedules, seeds)  # checks them before the program starts
    runs, chip, previous = Runs(arch, schedules, seeds, timing), SimulatedDriver(arch), driver._active

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if warmup:
            return compile_only(kernel, *args, grid=grid, warmup=True, **{"enable_fp_fusion": True, **options})
        return _launch(runs, kernel, grid, args, options)

    compile_only = JITFunction.run
    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(testing, "do_bench", _once),
        mock.patch.object(testing, "do_bench_cudagraph", _once),
        cuda_on_cpu(chip),
    ):
        driver.set_active(chip)  # type: ignore[arg-type]
        try:
            yield runs
        finally:
            driver._active = previous


def _once(fn: Any, *_: Any, quantiles: Any = None, **__: Any) -> Any:
    """Replace `triton.testing.do_bench`: run a function once."""
    fn()
    return untimed(quantiles)


def _launch(runs: Runs, kernel: Any, grid: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Compiled:
    """Do what JITFunction.run does up to the launch, then simulate."""
    from triton import knobs
    from triton.compiler import LazyDict
    from triton.runtime.driver import driver
    from triton.runtime.jit import compute_cache_key

    # device_assert is compiled, checks of overflow are not; fused multiply-adds as compile_for has them.
    kwargs = {"enable_fp_fusion": True, **options, "debug": True, "sanitize_overflow": False}
    for hook in kernel.pre_run_hooks:
        hook(*args, **kwargs)
    device = cast(SimulatedDriver, driver.active).get_current_device()
    _, key_cache, target, backend, binder = kernel.device_caches[device]
    try:
        bound, specialization, chosen = binder(*args, **kwargs)
    except RuntimeError:  # torch's, for tensors without an address
        check_addresses({**dict(zip(kernel.arg_names, args, strict=False)), **options})
        raise
    key = (runs.arch, compute_cache_key(key_cache, specialization, chosen))
    parsed, signature, constexprs, attributes = kernel._pack_args(backend, kwargs, bound, specialization, chosen)
    known = _compiled.setdefault(kernel, {})
    if key not in known:
        source = kernel.ASTSource(kernel, signature, constexprs, attributes)
        known[key] = to_ttgir(source, target, parsed.__dict__)
    sizes: Any = grid(bound) if callable(grid) else grid
    if _empty(sizes):
        return known[key]  # Triton's launchers do nothing then
    shown = LazyDict({"name": known[key].name, "function": None, "stream": 0})
    _call(knobs.runtime.launch_enter_hook, shown)
    given = simulated_arguments(bound, signature)
    report = simulate(known[key], sizes, given, schedules=runs.schedules, seeds=runs.seeds, timing=runs.timing)
    _call(knobs.runtime.launch_exit_hook, shown)
    runs.launched.append(Launched(kernel.fn.__name__, tuple(sizes), report))
    return known[key]


def _empty(sizes: Any) -> bool:
    """Whether a grid has no programs; one that is wrong in another way is not empty."""
    known = isinstance(sizes, (tuple, list)) and len(sizes) <= 3 and all(isinstance(n, int) for n in sizes)
    return known and bool(sizes) and min(sizes) == 0


def _call(hook: Any, shown: Any) -> None:
    if hook is not None:
        hook(shown)
