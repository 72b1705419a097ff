"""Progress of a command on standard error: none if that is no terminal, or with --no-progress."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

# Whether the command that runs in this context shows its progress: the option --no-progress of all commands.
shown: ContextVar[bool] = ContextVar("shown", default=True)

POLL_S = 0.5


@contextmanager
def working(what: str, done: Callable[[], float] | None = None) -> Iterator[None]:
    """Show `what` and the time passed; with `done`, which returns the part done (0 .. 1), also the time left."""
    console = Console(stderr=True)
    if not (shown.get() and console.is_terminal):
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    remaining = () if done is None else (TextColumn("left:"), TimeRemainingColumn(elapsed_when_finished=True))
    with Progress(*columns, *remaining, console=console, transient=True) as progress:
        task = progress.add_task(what, total=None if done is None else 1.0)
        ended = threading.Event()

        def poll(part: Callable[[], float]) -> None:
            while not ended.wait(POLL_S):
                progress.update(task, completed=part())

        poller = None if done is None else threading.Thread(target=poll, args=(done,), daemon=True)
        if poller is not None:
            poller.start()
        try:
            yield
        finally:
            ended.set()
            if poller is not None:
                poller.join()
