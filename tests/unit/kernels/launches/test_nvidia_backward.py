"""Workspace and grids of NVIDIA's backward launches, by hand."""

import pytest

pytest.importorskip("triton")

import torch

from tests.sim.backward import Case, launches_of
from warpattn.masks import Causal, Mask
from warpattn.problem.backward import Gradients, fitted_gradients, without_tiles, write_back


def gradients(dim: int, sinks: bool = False, dlse: bool = False) -> Gradients:
    """Tensors of a call of 3 rows, 5 keys and 2 heads; gradients are 7 before."""
    q, k, lse = torch.zeros(1, 3, 2, dim).half(), torch.zeros(1, 5, 2, dim).half(), torch.zeros(1, 2, 3)
    dq, dk, dv = (torch.full_like(x, 7) for x in (q, k, k))
    given = torch.arange(6.0).view(1, 2, 3) if dlse else None
    numbers = (torch.zeros(2), torch.full((2,), 7.0)) if sinks else (None, None)
    return Gradients(q, k, k.clone(), q.clone(), lse, q.clone(), given, numbers[0], dq, dk, dv, numbers[1])


@pytest.mark.parametrize("dim", [20, 64])
def test_gradients_that_tma_cannot_address_are_computed_aside_and_written_back(dim: int) -> None:
    x = gradients(dim)
    fitting = fitted_gradients(x)
    for number, name in enumerate(("dq", "dk", "dv")):
        made, wanted = getattr(fitting, name), getattr(x, name)
        assert (made.data_ptr() == wanted.data_ptr()) == (dim == 64) and made.shape[-1] % 8 == 0
        made.fill_(number)
    write_back(fitting, x)
    for number, name in enumerate(("dq", "dk", "dv")):
        assert (getattr(x, name) == number).all() and getattr(x, name).shape[-1] == dim


@pytest.mark.parametrize("dlse", [False, True])
def test_gradients_without_tiles(dlse: bool) -> None:
    """Of a sink what the LSE hands on: the LSE is the sink itself."""
    x = gradients(64, sinks=True, dlse=dlse)
    without_tiles(x)
    assert not any(gradient.any() for gradient in (x.dq, x.dk, x.dv))
    assert x.dsinks is not None and x.dsinks.tolist() == ([3.0, 12.0] if dlse else [0.0, 0.0])


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_workspace(arch: str) -> None:
    """A sequence of 300 rows has 384, tiles of 128; numbers of a tile's turns and sums of sinks are of 32 rows."""
    prepare, main, finish = launches_of(Case(300, 70, dim=72, arch=arch, sinks=True, deterministic=True, batch=3))
    made, heads = prepare.args["made"], 3 * prepare.args["shape"].heads_q
    assert made.shift.shape == made.delta.shape == (heads, 384)
    assert made.dq.shape == (heads, 384, 72)
    assert made.turns.shape == made.dsinks.shape == (heads, 12)
    assert main.args["turns"].pointer is made.turns and main.args["numbers"] == (made.shift, made.delta)
    assert finish.args["sums"] == (made.dq, made.dsinks, made.turns)
    assert prepare.grid == finish.grid == (12, heads)


@pytest.mark.parametrize(
    ("mask", "deterministic", "copies", "counters"),
    [(None, False, 1, True), (None, True, 2, True), (Causal(), False, 1, False)],
)
def test_sums_of_dq_and_their_counters(mask: Mask | None, deterministic: bool, copies: int, counters: bool) -> None:
    """Head dim 64 without a mask: CTAs in turns arrive at a tile one tile apart, and share two sums; in any order, the
    first one stores. Under a mask dQ is zeroed, without counters, unless rows are few."""
    prepare, _, finish = launches_of(Case(600, 600, heads=2, batch=3, mask=mask, deterministic=deterministic))
    made = prepare.args["made"]
    assert made.dq.shape == (copies * 6, 640, 64) and made.shift.shape == (6, 640)
    assert (made.turns.shape == (copies * 6, 20)) if counters else made.turns is None
    assert prepare.grid == finish.grid == (20, 6)


def test_what_a_call_does_not_need_is_not_there() -> None:
    prepare, *_ = launches_of(Case(600, 70, dim=64, mask=Causal()))
    assert prepare.args["made"].turns is None and prepare.args["made"].dsinks is None
