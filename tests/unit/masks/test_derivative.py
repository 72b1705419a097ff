"""Derived gradients of scores against torch's: of s, of every captured tensor, and what kernels compile of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import warpattn as wa
from tests.cases import SCORES, Case, Maker
from warpattn.language.derivative import Derivative, differentiate
from warpattn.language.evaluate import evaluate
from warpattn.language.expr import to_int

CASE = Case(batch=2, seq_q=11, seq_k=13, heads_q=4, heads_kv=2, dtype=torch.float64)
BIG = (2, 4, 11, 13)  # what every score broadcasts to


def grid() -> dict[str, Any]:
    b, h = torch.arange(2).view(2, 1, 1, 1), torch.arange(4).view(4, 1, 1)
    q, k = torch.arange(2, 13).view(11, 1), torch.arange(13)
    return {"b": b, "h": h, "q": q, "k": k, "len_q": 11, "len_k": 13}


def scattered(derivative: Derivative, env: dict[str, Any], g: Tensor) -> list[Tensor]:
    """The gradients of the captured tensors."""
    found = [torch.zeros_like(x, dtype=g.dtype) for x in derivative.tensors]
    for adjoint in derivative.adjoints:
        value = evaluate(adjoint.value, env, derivative.tensors, g.dtype)
        index = [evaluate(node, env, derivative.tensors, g.dtype).expand(BIG) for node in adjoint.index]
        target = found[adjoint.slot]
        inside = torch.ones(BIG, dtype=torch.bool)
        for i, size in zip(index, target.shape, strict=True):
            inside &= (i >= 0) & (i < size)
        target.index_put_(tuple(i[inside] for i in index), (g * value).expand(BIG)[inside], accumulate=True)
    return found


def agrees(score: wa.Score, s: Tensor) -> Derivative:
    """Slope and adjoints of a score are what autograd finds through its evaluation; the derivative, for more."""
    program = score.program()
    derivative = differentiate(program.out, program.tensors)
    tensors = tuple(x.detach().clone().requires_grad_(x.is_floating_point()) for x in program.tensors)
    floats = [x for x in tensors if x.requires_grad]
    s = s.detach().clone().requires_grad_()
    out = evaluate(program.out, grid() | {"s": s}, tensors, torch.float64).expand(BIG)
    g = torch.randn(BIG, dtype=torch.float64)
    wanted = [s, *floats]
    expected = [torch.zeros_like(x) for x in wanted]
    if out.requires_grad:
        found = torch.autograd.grad(out, wanted, g, allow_unused=True)
        expected = [zero if x is None else x for x, zero in zip(found, expected, strict=True)]
    env = grid() | {"s": s.detach()}
    again = Derivative(derivative.score, derivative.slope, derivative.adjoints, tuple(x.detach() for x in tensors))
    slope = evaluate(again.slope, env, again.tensors, torch.float64)
    mine = [(g * slope).expand(BIG)]
    mine += [x for x, kept in zip(scattered(again, env, g), tensors, strict=True) if kept.requires_grad]
    for one, other in zip(mine, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, equal_nan=True)
    return derivative


@pytest.fixture
def s() -> Tensor:
    return torch.randn(BIG, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) * 3


@pytest.mark.parametrize("name", [name for name in SCORES if name != "none"])
def test_every_score(name, s):
    score = SCORES[name](Maker(CASE, "cpu"))
    assert score is not None
    agrees(score, s)


def reals(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape) + shape[0]))


FUNCTIONS = {
    "square": lambda s, b, h, q, k: s * s - 3 * s,
    "powers": lambda s, b, h, q, k: s**3 - 2.0 * s**2 + s**0 + (1.5 + s * s) ** -2 + s**1,
    "real powers": lambda s, b, h, q, k: (1.0 + abs(s)) ** 0.5 + 2 ** (0.1 * s) + (1.0 + s * s) ** wa.to_float(k / 9),
    "quotient": lambda s, b, h, q, k: s / (2.0 + s * s) + 1.0 / (4.0 + abs(s)),
    "where": lambda s, b, h, q, k: wa.where((q - k) % 3 == 0, s * 2.0, wa.exp(s * 0.25)),
    "where of s": lambda s, b, h, q, k: wa.where(s > 0, s, 0.1 * s),
    "clamp": lambda s, b, h, q, k: wa.minimum(wa.maximum(s, -2.0), 2.0),
    "clamp by index": lambda s, b, h, q, k: wa.maximum(wa.minimum(s, k - q), -h),
    "of itself": lambda s, b, h, q, k: wa.maximum(s, s * 0.5) + abs(s - 1.0) * abs(-s),
    "logarithm": lambda s, b, h, q, k: wa.log(1.0 + wa.exp(s)) + wa.log(abs(s) + 0.5),
    "gaussian": lambda s, b, h, q, k: s + wa.exp(-((q - k) * (q - k)) / 18.0) * wa.tanh(s),
    "whole numbers": lambda s, b, h, q, k: s + to_int(s * 3) + wa.to_float(k // 3) - (s > 1.0),
    "remainder": lambda s, b, h, q, k: s % 2.0 + 1.0,
    "nothing": lambda s, b, h, q, k: wa.to_float(q - k),
    "a constant": lambda s, b, h, q, k: 2.5,
    "hidden": lambda s, b, h, q, k: wa.where(k > q, float("-inf"), 0.0 - -s),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name, s):
    agrees(wa.CustomScore(FUNCTIONS[name]), s)


CAPTURED: dict[str, tuple[Any, tuple[Tensor, ...]]] = {
    "gain per head": (lambda s, b, h, q, k, x: s * x[h], (reals(4),)),
    "gain per sequence and head": (lambda s, b, h, q, k, x: wa.tanh(s * x[b, h]), (reals(2, 4),)),
    "temperature": (lambda s, b, h, q, k, x: s / (0.5 + x[h] * x[h]), (reals(4),)),
    "relative table": (lambda s, b, h, q, k, x: s + x[q - k + 20], (reals(40),)),
    "relative table, partly outside": (lambda s, b, h, q, k, x: s * x[q - k + 3] + x[2 * k - q], (reals(9),)),
    "buckets": (
        lambda s, b, h, q, k, x: s + x[wa.minimum(to_int(wa.log(abs(q - k) + 1.0) * 3.0), 7), h],
        (reals(8, 4),),
    ),
    "read twice": (lambda s, b, h, q, k, x: x[k] * x[q] + s * x[k], (reals(13),)),
    "bucket of the score": (lambda s, b, h, q, k, x: s * x[to_int(abs(s))], (reals(12),)),
    "of a table of ints": (lambda s, b, h, q, k, x, n: s + x[n[k]], (reals(5), torch.arange(13) % 5)),
    "query and key": (lambda s, b, h, q, k, x, y: s + x[h, q - 2] * y[h, k], (reals(4, 11), reals(4, 13))),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_captured_tensors(name, s):
    fn, tensors = CAPTURED[name]
    agrees(wa.CustomScore(fn, **dict(zip(("x", "n" if "ints" in name else "y"), tensors, strict=False))), s)


def test_an_additive_mask(s):
    added = reals(2, 11, 13).masked_fill(reals(2, 11, 13) > 1, -torch.inf)
    score = wa.Materialized(added).additive()
    assert score is not None
    (adjoint,) = agrees(wa.SoftCap(2.0) | score, s).adjoints
    assert adjoint.symbols == {
        "b",
        "q",
        "k",
    }


@pytest.mark.parametrize("at", [0.0, -0.0, 1.0, 2.0])
def test_ties_are_torchs(at):
    kinks = wa.CustomScore(
        lambda s, b, h, q, k: abs(s) + wa.maximum(s, 0.0) + wa.minimum(2.0, s) + wa.maximum(s * s, s) + wa.minimum(s, k)
    )
    agrees(kinks, torch.full(BIG, at, dtype=torch.float64))


def test_what_only_adds_has_a_constant_slope():
    bias, slopes = reals(11, 13), reals(4)
    for score in (wa.ALiBi(4), wa.ALiBi(slopes), wa.Bias(bias), wa.ALiBi(4) | wa.Bias(bias)):
        program = score.program()
        assert differentiate(program.out, program.tensors).constant_slope == 1.0
    program = wa.CustomScore(lambda s, b, h, q, k: 3.0 - 2.0 * s).program()
    assert differentiate(program.out, ()).constant_slope == -2.0
    program = wa.SoftCap(3.0).program()
    assert differentiate(program.out, ()).constant_slope is None


def symbols(score: wa.Score) -> list[set[str]]:
    program = score.program()
    return [set(adjoint.symbols) for adjoint in differentiate(program.out, program.tensors).adjoints]


def test_the_index_of_an_adjoint_says_what_it_depends_on():
    assert symbols(wa.ALiBi(reals(4))) == [{"h"}]
    assert symbols(wa.ALiBi(reals(2, 4))) == [{"b", "h"}]
    assert symbols(wa.Bias(reals(4, 1, 13))) == [{"h", "k"}]
    assert symbols(wa.Bias(reals(2, 4, 11, 13))) == [{"b", "h", "q", "k", "len_q", "len_k"}]
    assert symbols(wa.CustomScore(lambda s, b, h, q, k, x: s + x[to_int(s)], x=reals(4))) == [{"s"}]


def test_what_can_be_infinite_says_so():
    def bounded(fn: Any) -> bool:
        return differentiate(wa.CustomScore(fn).program().out, ()).bounded

    assert bounded(lambda s, b, h, q, k: wa.tanh(s / 3.0) * abs(q - k) + wa.maximum(s, 0.0))
    assert not bounded(lambda s, b, h, q, k: s / (q - k))
    assert not bounded(lambda s, b, h, q, k: wa.log(s))
    assert not bounded(lambda s, b, h, q, k: wa.exp(s))


class _Applied(torch.autograd.Function):
    """A score whose backward is the derived one."""

    @staticmethod
    def forward(ctx: Any, derivative: Derivative, s: Tensor, *tensors: Tensor) -> Tensor:
        ctx.derivative = derivative
        ctx.save_for_backward(s, *tensors)
        return evaluate(derivative.score, grid() | {"s": s}, tensors, torch.float64).expand(BIG).clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        s, *tensors = ctx.saved_tensors
        known = ctx.derivative
        again = Derivative(known.score, known.slope, known.adjoints, tuple(tensors))
        env = grid() | {"s": s}
        slope = evaluate(again.slope, env, again.tensors, torch.float64)
        return None, (g * slope).expand(BIG), *scattered(again, env, g)


def test_gradcheck():
    """Against differences of the function itself, not another derivative."""
    score = wa.SoftCap(3.0) | wa.CustomScore(
        lambda s, b, h, q, k, x, y: wa.exp(0.3 * s) * x[h] + y[q - k + 9] / (1.0 + s * s), x=reals(4), y=reals(20)
    )
    program = score.program()
    s = (reals(*BIG) * 2).requires_grad_()
    tensors = [x.clone().requires_grad_() for x in program.tensors]
    derivative = differentiate(program.out, program.tensors)
    assert torch.autograd.gradcheck(lambda s, *x: _Applied.apply(derivative, s, *x), (s, *tensors), fast_mode=True)
