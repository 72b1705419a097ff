"""launches(): every `kernel[grid](…)` of Triton and Gluon inside it runs in the simulator.

    with launches("sm100", seeds=20) as runs:
        my_program()
    assert runs.clean, runs

Triton's own binder specialises the arguments, so what is simulated is what a launch on that chip compiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from typing import Any, cast
from unittest import mock
from weakref import WeakKeyDictionary

from ..compile import ARCHS, Compiled, to_ttgir
from ..errors import SimulationError
from ..machine.agents import SCHEDULES
from ..memory.findings import Finding
from ..report import Report
from ..simulate import simulate
from .cuda_names import cuda_on_cpu
from .driver import SimulatedDriver, untimed
from .values import SavedMemory, simulated_arguments

_compiled: WeakKeyDictionary[Any, dict[Any, Compiled]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Launched:
    """One launch: its kernel's name, its grid, and a report for each schedule and seed."""

    kernel: str
    grid: tuple[int, ...]
    reports: tuple[Report, ...]

    @property
    def findings(self) -> list[Finding]:
        return [finding for report in self.reports for finding in report.findings]

    def __str__(self) -> str:
        grid = ", ".join(map(str, self.grid))
        head = f"{self.kernel}[{grid}]: {len(self.distinct())} findings in {len(self.reports)} runs"
        return "\n".join((head, *(f"  {line}" for line in self.distinct())))

    def distinct(self) -> list[str]:
        """Each fault once, with the first schedule and seed that show it and in how many runs it is."""
        seen: dict[Any, tuple[Finding, Report, list[int]]] = {}
        for number, report in enumerate(self.reports):
            for finding in report.findings:
                runs = seen.setdefault((finding.kind, finding.buffer, finding.lines), (finding, report, []))[2]
                if number not in runs:
                    runs.append(number)
        return [
            f"{finding} (schedule {report.schedule!r}, seed {report.seed}; in {len(runs)} of {len(self.reports)} runs)"
            for finding, report, runs in seen.values()
        ]


@dataclass
class Runs:
    """The launches so far."""

    arch: str
    orders: Sequence[tuple[str, int]]
    timing: bool = False
    launched: list[Launched] = field(default_factory=list)

    @property
    def findings(self) -> list[Finding]:
        return [finding for launch in self.launched for finding in launch.findings]

    @property
    def clean(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        if not self.launched:
            return f"no kernel was launched on the simulated {self.arch}"
        return "\n".join(map(str, self.launched))


@contextmanager
def launches(
    arch: str, *, schedules: str | Sequence[str] = "all", seeds: int = 1, timing: bool = False
) -> Iterator[Runs]:
    """Run the launches of Triton and Gluon kernels in the simulator instead of on a card.

    arch: sm90, sm100, gfx942 or gfx950. schedules: "all", one of them, or several: each launch runs once under each of
    them, under "random" once for each of `seeds` seeds, always from the same memory; the first one's results stay.
    timing: predict the times of the first. Arguments are torch tensors on the CPU (a program's "cuda" means the CPU
    here), NumPy arrays and numbers; autotuners take their first configuration, and benchmarks run a function once.

    Raises SimulationError for an unknown chip or schedule, and from the launch for what cannot be simulated.
    """
    from triton import testing
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    if arch not in ARCHS:
        raise SimulationError(f"arch is {arch!r}; it must be one of {', '.join(ARCHS)}")
    runs, chip, previous = Runs(arch, orders_of(schedules, seeds), timing), SimulatedDriver(arch), driver._active

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


def orders_of(schedules: str | Sequence[str], seeds: int) -> tuple[tuple[str, int], ...]:
    """The (schedule, seed) of each run of a launch."""
    if not isinstance(seeds, int) or isinstance(seeds, bool) or seeds < 1:
        raise SimulationError(f"seeds is {seeds!r}; it must be an integer from 1 on")
    names = SCHEDULES if schedules == "all" else (schedules,) if isinstance(schedules, str) else tuple(schedules)
    for name in names:
        if name not in SCHEDULES:
            raise SimulationError(f"schedules has {name!r}; it must be 'all' or of {', '.join(SCHEDULES)}")
    return tuple((name, seed) for name in names for seed in range(seeds if name == "random" else 1))


def _once(fn: Any, *_: Any, quantiles: Any = None, **__: Any) -> Any:
    """`triton.testing.do_bench`, which would run a function for a while."""
    fn()
    return untimed(quantiles)


def _launch(runs: Runs, kernel: Any, grid: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Compiled:
    """What JITFunction.run does up to the launch, then the simulation."""
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
    bound, specialization, given = binder(*args, **kwargs)
    key = (runs.arch, compute_cache_key(key_cache, specialization, given))
    parsed, signature, constexprs, attributes = kernel._pack_args(backend, kwargs, bound, specialization, given)
    known = _compiled.setdefault(kernel, {})
    if key not in known:
        source = kernel.ASTSource(kernel, signature, constexprs, attributes)
        known[key] = to_ttgir(source, target, parsed.__dict__)
    sizes: Any = grid(bound) if callable(grid) else grid
    shown = LazyDict({"name": known[key].name, "function": None, "stream": 0})
    _call(knobs.runtime.launch_enter_hook, shown)
    reports = _simulated(runs, known[key], sizes, simulated_arguments(bound, signature))
    _call(knobs.runtime.launch_exit_hook, shown)
    runs.launched.append(Launched(kernel.fn.__name__, tuple(sizes), reports))
    return known[key]


def _call(hook: Any, shown: Any) -> None:
    if hook is not None:
        hook(shown)


def _simulated(runs: Runs, compiled: Compiled, grid: Any, arguments: dict[str, Any]) -> tuple[Report, ...]:
    """A report for each order. The first order runs last, so that its results stay."""
    saved = SavedMemory(arguments) if len(runs.orders) > 1 else None
    reports = []
    for number, (schedule, seed) in reversed(list(enumerate(runs.orders))):
        timing = runs.timing and number == 0
        with nullcontext() if number == 0 else redirect_stdout(StringIO()):  # device_print prints once
            reports.append(simulate(compiled, grid, arguments, schedule=schedule, seed=seed, timing=timing))
        if saved is not None and number:
            saved.restore()
    return tuple(reversed(reports))
