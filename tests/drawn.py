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
