"""Backward calls on a card that repeat one before: launches are kept, and only addresses are written.

CPU tensors stand in for a card's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from tests.unit.runtime.serving.test_append_again import launched_with
from tests.unit.runtime.test_dispatch import driver, half  # noqa: F401  a fixture
from warpattn.problem import Call, validate
from warpattn.problem.backward import CheckedBackward
from warpattn.runtime.training import gradients, repeated
from warpattn.runtime.training.gradients import Along, Saved, Wanted, take_gradients
from warpattn.runtime.training.plan import plan_backward
from warpattn.sequences import Dense

OFFSETS = torch.tensor([0, 40, 96], dtype=torch.int32)
CALLS = {
    "dense": lambda x: Call(*x, Dense(), wa.Causal()),
    "bias": lambda x: Call(*x, Dense(), None, wa.Bias(torch.randn(4, 96, 96))),
    "sinks": lambda x: Call(*x, Dense(), wa.Causal(), None, torch.zeros(4)),
    "ragged": lambda x: Call(*(t[0] for t in x), wa.Ragged(OFFSETS), wa.Causal()),
}


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated, "_known", {})


def tensors(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    return tuple(half(1, 96, heads, 64).to(dtype) for heads in (4, 2, 2))


def take(kind: str, x: tuple[torch.Tensor, ...], deterministic: bool = False, **more: Any) -> tuple[torch.Tensor, ...]:
    """Launch; every tensor that the launches read or write, workspace aside."""
    call = replace(CALLS[kind](x), **more)
    checked = replace(validate(replace(call, return_lse=True, backend="reference")), backend="sm90")
    out, dout = torch.empty_like(call.q), half(*call.q.shape).to(call.q.dtype)
    saved = Saved(call.q, call.k, call.v, out, torch.zeros(checked.lse_shape), call.sinks)
    backward = CheckedBackward.of(checked, deterministic)
    found = take_gradients(backward, call.sequence, saved, Along(dout, None), Wanted(call.sinks is not None, ()))
    every = (*saved[:4], dout, found.q, found.k, found.v, found.sinks)
    return tuple(t for t in every if t is not None)


@pytest.mark.parametrize("kind", CALLS)
def test_a_call_like_one_before_only_writes_addresses(kind, driver, monkeypatch):  # noqa: F811
    seen = launched_with(monkeypatch)
    first = take(kind, tensors())
    steps = len(seen)
    monkeypatch.setattr(gradients, "list_backward_launches", None)  # nothing is planned again
    other = take(kind, tensors())
    assert len(seen) == 2 * steps == (8 if kind == "ragged" else 6)
    written = {at for parameters in seen[steps:] for at in parameters} | set(driver.replaced)
    assert {t.data_ptr() for t in other} <= written
    assert not {t.data_ptr() for t in first} & written


MORE = {"order": {"deterministic": True}, "scale": {"scale": 0.3}, "bounds": {"sequence": wa.Ragged(OFFSETS, max_q=56)}}


@pytest.mark.parametrize("change", ["dtype", "strides", "alignment", *MORE])
def test_another_call_goes_the_long_way(change, driver, monkeypatch):  # noqa: F811
    kind = "ragged" if change == "bounds" else "dense"
    take(kind, tensors())
    q, k, v = tensors(torch.float16) if change == "dtype" else tensors()
    if change == "strides":
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    if change == "alignment":
        q = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape)
    planned = []
    plan = gradients.list_backward_launches
    monkeypatch.setattr(gradients, "list_backward_launches", lambda *x: planned.append(x) or plan(*x))
    take(kind, (q, k, v), **MORE.get(change, {}))
    assert len(planned) == 1


def test_a_call_of_copies_is_planned_again(driver, monkeypatch):  # noqa: F811
    """Its launches are those of the copies."""
    planned, plan = [], gradients.list_backward_launches
    monkeypatch.setattr(gradients, "list_backward_launches", lambda *x: planned.append(x) or plan(*x))
    q, k, v = tensors()
    for _ in range(2):
        take("dense", (torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape), k, v))
    assert len(planned) == 2


def test_the_plan_says_how_gradients_of_captured_tensors_are_taken():
    for kind, call in CALLS.items():
        problem = validate(replace(call(tensors()), backend="reference")).problem
        for arch in ("sm90", "sm100"):
            text = str(plan_backward(problem, arch))
            assert ("added by atomic additions of a kernel" in text) == (kind == "bias")
