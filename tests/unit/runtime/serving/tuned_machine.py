"""A stand-in card with a name and an empty cache folder, a timer that knows its times, and rows made by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import warpattn as wa
from tests.unit.runtime.card import B, D, H, S
from warpattn.kernels.sm90.candidates import candidates
from warpattn.problem import Problem
from warpattn.problem.arch import ARCHS
from warpattn.problem.launch import BUILT_IN
from warpattn.runtime import bound_launches, cuda, kernel_cache
from warpattn.runtime.launches import filled_problem
from warpattn.runtime.tuned import rows, table
from warpattn.serving import tuning
from warpattn.serving.call_shape import CallShape
from warpattn.serving.layers import Layer

CARD = "Stand-in (132 SMs)"
SHAPE = CallShape(Layer(H, H, D, D), B, S, S, mask=wa.Full())
DECODE = CallShape(Layer(8, 2, D, D), 2, 1, 1024, 16)


class Times:
    """A timer whose times are known: microseconds by name, 10 for all others."""

    device = torch.device("cpu")

    def __init__(self, times: Mapping[str, float] | None = None) -> None:
        self.known: Mapping[str, float] = times or {}
        self.timed: list[str] = []

    def microseconds(
        self, calls: Mapping[str, Sequence[Callable[[], object]]], rounds: int, progress: Callable[[float], None]
    ) -> dict[str, list[float]]:
        self.timed = list(calls)
        progress(1.0)
        return {name: [self.known.get(name, 10.0)] * rounds for name in calls}


def problem_of(shape: CallShape) -> Problem:
    return filled_problem(shape.planned().checked.problem)


def others(shape: CallShape) -> tuple[str, ...]:
    return table.configurations(problem_of(shape)).others


@pytest.fixture(name="machine", autouse=True)
def make_machine(card, tmp_path, monkeypatch):
    """The stand-in card has a name, an empty cache folder, nothing to compile; returned: configurations loaded."""
    loaded, handles = [], iter(range(100, 10000))
    real_load = bound_launches.load

    def load(launch, device):
        loaded.append(launch.key[0])
        return real_load(launch, device)

    for owner, name, value in (
        (table, "TABLE", tuning.table.TABLE), (table, "card_of", lambda device: CARD),
        (table, "card_here", lambda arch: CARD), (tuning, "compile_all", lambda *_: {}),
        (bound_launches, "load", load), (cuda, "load_function", lambda *_: next(handles)),
        (kernel_cache, "_said", set()),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, value)
    monkeypatch.setattr("warpattn.runtime.plan.card_here", lambda arch: CARD)
    monkeypatch.setattr(table.TABLE, "rows", None)
    monkeypatch.setenv("WARPATTN_CACHE_DIR", str(tmp_path / "cache"))
    return loaded


def config_of(shape: CallShape, name: str) -> Any:
    return candidates(problem_of(shape), ARCHS["sm90"])[name].config


def row_of(shape: CallShape, candidate: str, **fields: Any) -> rows.Row:
    """A row as `tune` writes it."""
    times = {BUILT_IN: 10.0, candidate: 8.0}
    made = rows.Row(
        table.key_of(problem_of(shape), "sm90", CARD), str(shape), CARD, candidate, "built", times, {}, 5, "2026-11-23",
        rows.kernel_cache.version(), "3.9.0",
    )  # fmt: skip
    return replace(made, **fields)


def write(*found: rows.Row) -> None:
    rows.add(rows.path(), found)
    table.TABLE.rows = None
