"""Lines on standard error: a kernel is compiled for its first use, which takes seconds; it cannot be kept on disk."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_said: set[str] = set()


def announce(name: str, place: Path | None) -> None:
    """Say that `name` is being compiled; nothing if standard error is no terminal, or with WARPATTN_PROGRESS=0."""
    if not _wanted() or not sys.stderr.isatty():
        return
    kept = "for this process: it cannot be kept" if place is None else f"once: it is kept in {place}"
    print(f"warpattn: compiling {name}, {kept}", file=sys.stderr, flush=True)


def say_once(sentence: str) -> None:
    """A sentence about this machine, once in a process, on a terminal or not; nothing with WARPATTN_PROGRESS=0."""
    if sentence not in _said and _wanted():
        print(f"warpattn: {sentence}", file=sys.stderr, flush=True)
    _said.add(sentence)


def _wanted() -> bool:
    return sys.stderr is not None and os.environ.get("WARPATTN_PROGRESS") != "0"
