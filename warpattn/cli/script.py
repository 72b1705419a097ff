"""`simulate SCRIPT.py`: runs a program whose Triton and Gluon kernels run in the simulator."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from warpattn.cli.tensors import is_file, writing
from warpattn.errors import AttentionError
from warpattn.sim import SimulationError
from warpattn.sim.host.launches import Runs, launches


def simulate_script(
    program: Sequence[str],
    arch: str,
    orders: tuple[Sequence[str], range],
    files: tuple[Path | None, Path | None],
    console: Console,
) -> int:
    """Run a program with its arguments, each launch under these schedules and seeds, and print what the launches did.

    files: to write a timeline and a report to. Returns the exit status: 1 on findings, else the program's own.
    """
    (path, *arguments), (timeline, report) = (Path(program[0]), *program[1:]), files
    if not is_file(path):
        if program[0].startswith("-"):  # an unknown option would be taken for the script
            rule = "`python -m warpattn simulate --help` lists them; options of a script follow its name"
            raise AttentionError(f"simulate has no option {program[0]!r}; {rule}")
        raise AttentionError(f"script is {str(path)!r}; there is no such file")
    check_syntax(path)
    status = 0
    simulated = launches(arch, schedules=orders[0], seeds=orders[1], timing=timeline is not None)
    try:
        with simulated as runs, as_main(path, arguments):
            runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except SimulationError as error:
        raise AttentionError(f"{path.name}: {error}") from None
    console.print(str(runs))
    if timeline is not None:
        write_longest(runs, timeline, console)
    if report is not None:
        with writing(report):
            runs.save_report(report)
        console.print(f"wrote {report}")
    return status if runs.clean else 1


def check_syntax(path: Path) -> None:
    """Raise AttentionError if a file is no Python program. Errors of the program itself keep their traceback."""
    try:
        compile(path.read_bytes(), str(path), "exec")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:  # null bytes; nested too deep
        at = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        why = error.msg if isinstance(error, SyntaxError) else str(error) or "nested too deep"
        raise AttentionError(f"script is {str(path)!r}{at}: {why}; it must be a program in Python") from None
    except OSError as error:
        raise AttentionError(f"script is {str(path)!r}; it cannot be read: {error.strerror}") from None


@contextmanager
def as_main(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Set `sys.argv` and `sys.path` as Python does for a program."""
    argv, paths = sys.argv, sys.path
    sys.argv, sys.path = [str(path), *arguments], [str(path.resolve().parent), *paths]
    try:
        yield
    finally:
        sys.argv, sys.path = argv, paths


def write_longest(runs: Runs, path: Path, console: Console) -> None:
    """Write the timeline of the launch that takes the most cycles."""
    timed = [(report.timing.cycles, launch, report) for launch in runs.launched
             for report in launch.reports if report.timing is not None]  # fmt: skip
    if not timed:
        console.print(f"no launch, so {path} was not written")
        return
    cycles, launch, report = max(timed, key=lambda each: each[0])
    write = report.save_trace if path.suffix == ".json" else report.save_timeline
    with writing(path):
        write(path)
    console.print(f"{launch.kernel}: {cycles:.0f} cycles by the model; wrote {path}")
