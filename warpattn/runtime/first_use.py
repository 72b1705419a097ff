"""One line on standard error when a kernel is compiled for its first use, which takes seconds."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["announce"]


def announce(name: str, place: Path | None) -> None:
    """Say that `name` is being compiled; nothing if standard error is no terminal, or with WARPATTN_PROGRESS=0."""
    if sys.stderr is None or not sys.stderr.isatty() or os.environ.get("WARPATTN_PROGRESS") == "0":
        return
    kept = "for this process: there is no folder to keep it in" if place is None else f"once: it is kept in {place}"
    print(f"warpattn: compiling {name}, {kept}", file=sys.stderr, flush=True)
