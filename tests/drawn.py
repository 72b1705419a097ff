"""Which cases `make test` draws from a matrix; the others are marked `full` and run by `make test-full` alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def drawn(cases: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """`cases` for `parametrize`, values or tuples of them: those of `kept` are drawn, each of which is one of them."""
    cases = list(cases)
    missing = [case for case in kept if case not in cases]
    assert not missing, f"no such cases: {missing}"
    return [case if case in kept else left_out(case) for case in cases]


def left_out(case: Any) -> Any:
    """A case of `parametrize` that only `make test-full` runs."""
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.full)


def each_once(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Few combinations in which every value of every axis occurs: as many as the longest axis has values."""
    most = max(len(axis) for axis in axes)
    return [tuple(axis[i % len(axis)] for axis in axes) for i in range(most)]


def in_turn(
    cases: Iterable[Any], kept: Collection[Any], schedules: Sequence[tuple[Any, ...]], each: int = 2
) -> list[Any]:
    """(case, *schedule) for `parametrize`: each case of `kept` is drawn under `each` of the schedules, the next case
    under the next ones, so that every schedule has its turn."""
    step = -(-len(schedules) // each)
    turns = [(case, (i + j * step) % len(schedules)) for i, case in enumerate(kept) for j in range(each)]
    missing = set(range(len(schedules))) - {number for _, number in turns}
    assert not missing, f"no case has these schedules: {[schedules[number] for number in missing]}"
    every = [(case, *schedule) for case in cases for schedule in schedules]
    return drawn(every, [(case, *schedules[number]) for case, number in turns])
