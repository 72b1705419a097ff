"""Command-line arguments that benchmarks have in common, so that each means the same and is refused alike."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from bench.peers.adapter import no_gpu

INTERRUPTED = 130  # 128 + SIGINT, as of a shell


def status(main: Callable[[], int | None]) -> int:
    """The exit status of a benchmark's program: what `main` returns, or 130, without a word, after Ctrl-C."""
    try:
        return main() or 0
    except KeyboardInterrupt:
        return INTERRUPTED


def positive(text: str) -> int:
    """A number of at least 1, as a type of argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def timed_cases(module: str, description: str | None, only: str = "this") -> argparse.ArgumentParser:
    """The parser of `python -m module`, which times its cases in rounds; `only`: what --only takes."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--only", default="", help=f"keep only cases whose name contains {only}")
    parser.add_argument("--rounds", type=positive, default=20, help="recorded rounds per case")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs and the order within a round")
    parser.add_argument("--json", type=Path, help="write the record here (after every case)")
    return parser


def require_card(parser: argparse.ArgumentParser, what: str, *packages: str) -> None:
    """Ends with one sentence if `what` cannot be timed: without a card or without the packages."""
    if reason := no_gpu():
        parser.error(f"{what} are timed on a card: {reason}")
    if absent := [name for name in packages if find_spec(name) is None]:
        parser.error(f"{what} need {' and '.join(absent)}, which is not installed")
