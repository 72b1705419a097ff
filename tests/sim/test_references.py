"""Rows whose reference maxima move in simulated kernels, where weights made before a tile's maximum is known are made
again: of kernels with an LSE, whose references move early, and without."""

import math
import re
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor

import warpattn as wa
from tests.drawn import drawn
from warpattn.sim.ops import asm
from warpattn.sim.simulate import linked

LN_2 = math.log(2)
KEYS, TILE = 512, 128  # no key tile is masked, so all are visited in order
with_lse_and_without = pytest.mark.parametrize("has_lse", [True, False], ids=["lse", "no lse"])


def attend(q: Tensor, k: Tensor, v: Tensor, has_lse: bool, arch: str = "sm90", **tail: Any) -> tuple[Tensor, ...]:
    """Out and, with `has_lse`, LSE."""
    found = wa.attention(q, k, v, return_lse=has_lse, backend=f"simulate:{arch}", **tail)
    return found if isinstance(found, tuple) else (found,)


def growing(dim: int, exponents: float, dtype: torch.dtype, down: bool) -> tuple[Tensor, ...]:
    """q, k, v of one head: the largest weight of a tile of keys is 2^`exponents` times that of the tile before, or with
    `down` of the tile behind."""
    chance = torch.Generator().manual_seed(dim)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=chance)

    line = draw(dim)
    line /= line.norm()
    sizes = (torch.arange(KEYS).flip(0) if down else torch.arange(KEYS)) / TILE * exponents * dim**0.5 / 1.4427 / 8
    q, k = 8 * line + draw(90, dim) / 20, sizes[:, None] * line + draw(KEYS, dim) / 20
    return tuple(x.to(dtype)[None, :, None] for x in (q, k, draw(KEYS, dim)))


def weighed(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The output in fp64, with weights rounded to `dtype`, and the LSE."""
    q, k, v = (x[0, :, 0].double() for x in (q, k, v))
    s = q @ k.T * q.shape[1] ** -0.5
    return torch.softmax(s, -1).to(dtype).double() @ v, torch.logsumexp(s, -1)


@pytest.mark.parametrize("dtype", drawn([torch.float16, torch.bfloat16], [torch.float16]), ids=str)
@pytest.mark.parametrize(
    ("dim", "scored"), drawn(product([64, 128, 192, 256], [False, True]), [(128, False), (192, True)])
)
@pytest.mark.parametrize("exponents", [12.0, 16.5, 140.0])
@pytest.mark.parametrize("down", [False, True])
@with_lse_and_without
def test_weights_that_grow(
    has_lse: bool, down: bool, exponents: float, dim: int, scored: bool, dtype: torch.dtype
) -> None:
    """Up to 2^15 a sum stays, with an LSE up to 2^6; above, references move; 2^140 is no fp32. `scored`: by a function
    that changes none."""
    q, k, v = growing(dim, exponents, dtype, down)
    out, *lse = attend(q, k, v, has_lse, score=wa.ALiBi(torch.zeros(1)) if scored else None)
    exact, logsum = weighed(q, k, v, torch.float64)
    rounded, _ = weighed(q, k, v, dtype)
    allowed = 4 * (rounded - exact).abs().max()
    assert (out[0, :, 0].double() - exact).abs().max() <= allowed
    assert all((x.flatten().double() - logsum).abs().max() <= 1e-6 * logsum.abs().max() for x in lse)


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("arch", "dim"),
    drawn(
        [*(("sm90", dim) for dim in (64, 128, 192, 256)), *(("sm100", dim) for dim in (64, 128, 256)), ("gfx942", 64)],
        [("sm90", 64), ("sm90", 128), ("sm100", 128), ("sm100", 256)],
    ),
)
def test_a_key_with_all_the_weight_gives_its_value(arch: str, dim: int, dtype: torch.dtype, scored: bool) -> None:
    """Correctly rounded, whatever its tile: else the rounding of its weight would multiply a row of the output, and the
    gradient of q, which is small there, would lose its digits."""
    torch.manual_seed(0)
    exponents = torch.linspace(6.1, 15.9, 90) * dim**0.5 / 1.4427
    q, k, v = torch.zeros(90, dim), torch.zeros(KEYS, dim), torch.randn(KEYS, dim)
    q[:, 0], q[:, 1], k[300, 0], k[:, 1] = exponents, 100.0 * dim**0.5, 1.0, -1.0
    k[[5, 300, 500], 1] = 0.0  # all others have no weight
    q, k, v = (x.to(dtype) for x in (q, k, v))
    score = wa.ALiBi(torch.zeros(1)) if scored else None
    q, k, v = (x[None, :, None] for x in (q, k, v))
    out, _ = attend(q, k, v, True, arch, score=score)
    exact = wa.attention(*(x.double() for x in (q, k, v)), backend="reference")
    assert (out != exact.to(dtype)).double().mean() < 0.01


@pytest.mark.parametrize("score", [2.0**22, 1.2e7, 9.4e7, -9.4e7, 1e9, 2.0**100])
@pytest.mark.parametrize("dim", drawn([64, 128, 192, 256], [192]))
@with_lse_and_without
def test_scores_of_a_function_may_have_any_size(has_lse: bool, dim: int, score: float) -> None:
    """Rows of one score; where scores are subtracted before they are multiplied, the first key has 8 more, or as little
    more as fp32 has. And, in another call, rows whose largest scores are in the first tile of keys or in the last."""
    torch.manual_seed(dim)
    q, k, v = (torch.randn(1, n, 1, dim).bfloat16() for n in (90, 400, 400))
    still, moving = torch.full((90, 400), score), torch.full((90, 400), -abs(score))
    if abs(score) > 2.0**27 * LN_2:
        still[:, 1:] = min(score - 8.0, float(torch.tensor(score).nextafter(torch.tensor(-math.inf))))
    moving[:45, :40] = moving[45:, 360:] = abs(score)
    for bias in (still, moving):
        found, *lse = attend(q * 0.0, k, v, has_lse, score=wa.Bias(bias[None, None]))
        exact = bias.double().softmax(-1) @ v[0, :, 0].double()
        torch.testing.assert_close(found[0, :, 0].double(), exact, atol=8e-3, rtol=8e-3)
        for each in lse:
            torch.testing.assert_close(each.flatten(), bias.amax(-1).flatten(), atol=8.0, rtol=1e-6)


@pytest.mark.parametrize("dim", drawn([64, 128, 256], [128]))
@pytest.mark.parametrize("down", [False, True])
@with_lse_and_without
def test_bits_of_a_row_depend_on_its_own_scores(has_lse: bool, down: bool, dim: int) -> None:
    """Not on the other rows of a warp, whose references move."""
    q, k, v = growing(dim, 20.0, torch.bfloat16, down)
    q[:, 5] *= 0.02  # its largest score grows a little with each tile
    still = torch.zeros_like(q)
    still[:, 5] = q[:, 5]
    moving, alone = (attend(x, k, v, has_lse) for x in (q, still))
    assert torch.equal(moving[0][:, 5], alone[0][:, 5]) and not torch.equal(moving[0][:, 4], alone[0][:, 4])
    assert all(torch.equal(one[..., 5], other[..., 5]) for one, other in zip(moving[1:], alone[1:], strict=True))


@pytest.fixture(name="voters")
def counted_voters(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Warps whose votes count, while there are some; else all do, as always in the simulator, which takes a role as a
    unit."""
    voters: list[int] = []

    def vote(role: Any, match: re.Match[str], x: np.ndarray, bound: np.ndarray) -> Any:
        warps = (x > bound).reshape(4, -1).any(1)
        return int(bool(warps[voters or ...].any()))
        yield

    handlers = [(pattern, vote if run is asm._vote_any_greater else run) for pattern, run in asm._WHOLE]
    monkeypatch.setattr(asm, "_WHOLE", handlers)
    linked.cache_clear()
    yield voters
    linked.cache_clear()


ALONE = [(64, False), (192, True)]


@pytest.mark.parametrize(("dim", "scored"), drawn(product([64, 128, 192, 256], [False, True]), ALONE))
@with_lse_and_without
def test_a_warp_that_branches_alone(voters: list[int], has_lse: bool, dim: int, scored: bool) -> None:
    """Its rows have the same bits as if the other warps did what it does."""
    q, k, v = growing(dim, 40.0, torch.bfloat16, True)
    q *= torch.tensor([1.0, 0.2, 0.02, 0.6, 0.0, 0.4]).repeat_interleave(16)[:90, None, None]
    score = wa.ALiBi(torch.zeros(1)) if scored else None

    def same(warp: int) -> Tensor:
        voters[:] = [warp]
        found, *found_lse = attend(q, k, v, has_lse, score=score)
        alike = (found == out).all(-1).flatten()
        return alike if not lse else alike & (found_lse[0] == lse[0]).flatten()

    out, *lse = attend(q, k, v, has_lse, score=score)
    warps = torch.arange(90) % 64 // 16
    alike = [same(warp) for warp in range(4)]
    assert all(rows[warps == warp].all() for warp, rows in enumerate(alike))
    assert not alike[2].all()  # its rows never move, others have to
