"""Random calls on a card: what tests/sim/calls/test_random_calls.py asks of simulated kernels."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests import random_calls
from tests.oracle import Inputs
from tests.random_calls import draw, wrong

pytestmark = pytest.mark.gpu
SEEDS = 64


def moved(x: Tensor, memo: dict[int, object]) -> Tensor:
    """A tensor on the card, with its strides, its place in memory that it may share, and the way of its gradient."""
    if x.requires_grad:
        return x.cuda()
    memory = x.untyped_storage()
    there = memo.setdefault(memory.data_ptr(), torch.empty(0, dtype=torch.uint8).set_(memory).cuda())
    assert isinstance(there, Tensor)
    return there.view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())


def on_card(x: Inputs) -> Inputs:
    """The call with all of its tensors on the card, those of its mask, its score and its sequence, too."""
    with mock.patch.object(Tensor, "__deepcopy__", moved):
        return copy.deepcopy(x)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_random_call(seed, monkeypatch):
    attend = random_calls.attend

    def here(x: Inputs, _: str, has_lse: bool = True) -> tuple[Tensor | None, ...]:
        return tuple(None if y is None else y.cpu() for y in attend(on_card(x), "auto", has_lse))

    monkeypatch.setattr(random_calls, "attend", here)
    call = draw("sm90", seed)
    found = wrong("sm90", call)
    assert not found, f"{found}: {call.how}, {call.case.name}"
