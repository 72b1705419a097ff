"""Shows one line on standard error during a long run: what runs, how much of it is done, and the time left.

Only on a terminal, and not if a program shows its own progress (`silent`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_shown: ContextVar[bool] = ContextVar("_shown", default=True)

FIRST_S, EVERY_S = 3.0, 0.5


@contextmanager
def silent() -> Iterator[None]:
    """Let runs inside print no progress."""
    before = _shown.set(False)
    try:
        yield
    finally:
        _shown.reset(before)


class Progress:
    """The line of one run of `programs` programs."""

    def __init__(self, what: str, programs: int, now: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stderr if _shown.get() and sys.stderr.isatty() else None
        self._what, self._programs, self._now = what, programs, now
        self._began = now()
        self._next = self._began + FIRST_S
        self._width = 0

    def tell(self, left: int, steps: int) -> None:
        """Update the line if it is time; `left`: programs that have not started."""
        if self._stream is None:
            return
        now = self._now()
        if now < self._next:
            return
        self._next, passed, done = now + EVERY_S, now - self._began, self._programs - left
        text = f"simulating {self._what}: {steps:,} steps in {passed:.0f} s"
        if self._programs > 1 and done:
            rest = passed * left / done
            text += f", {done:,} of {self._programs:,} programs, about {rest:.0f} s left"
        self._write(text)

    def close(self) -> None:
        """Remove the line."""
        if self._stream is not None and self._width:
            self._write("")
            self._stream.write("\r")

    def _write(self, text: str) -> None:
        assert self._stream is not None
        self._stream.write("\r" + text.ljust(self._width))
        self._stream.flush()
        self._width = len(text)
