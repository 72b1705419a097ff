"""Progress on standard error if that is a terminal: rich's bar where rich is installed, else plain lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Step = Callable[[str], None]


@contextmanager
def bar(total: int, show: bool = True) -> Iterator[Step]:
    """Yields `step(what)`, to be called when the next of `total` parts begins."""
    if not (show and sys.stderr.isatty()):
        yield lambda what: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield _lines(total)
        return
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=total)
        begun = 0

        def step(what: str) -> None:
            nonlocal begun
            progress.update(task, completed=begun, description=what)
            begun += 1

        yield step
        progress.update(task, completed=total, description="done")


def _lines(total: int) -> Step:
    """Steps as numbered lines."""
    begun = 0

    def step(what: str) -> None:
        nonlocal begun
        begun += 1
        print(f"[{begun}/{total}] {what}", file=sys.stderr, flush=True)

    return step
