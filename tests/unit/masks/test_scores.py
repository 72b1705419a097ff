"""Scores against plain formulas, alone and chained, and the errors of bad ones."""

import math
from pathlib import Path

import pytest
import torch

import warpattn.scores as ws
from warpattn.errors import AttentionError
from warpattn.language.evaluate import evaluate
from warpattn.language.expr import exp, log, maximum, minimum, tanh, where
from warpattn.masks import Lengths

B, H, SQ, SK = 2, 6, 4, 7


def applied(score, s, dtype=torch.float64):
    """The traced score applied to s [B, H, Sq, Sk]."""
    program = score.program()
    return evaluate(program.out, grid() | {"s": s}, program.tensors, dtype)


def grid():
    b, h = torch.arange(B).view(B, 1, 1, 1), torch.arange(H).view(H, 1, 1)
    q, k = torch.arange(SQ).view(SQ, 1) + SK - SQ, torch.arange(SK)
    return {"b": b, "h": h, "q": q, "k": k, "len_q": SQ, "len_k": SK}


@pytest.fixture
def s():
    return torch.randn(B, H, SQ, SK, dtype=torch.float64) * 10


def distance():
    return (grid()["q"] - grid()["k"]).abs()


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (8, [2.0 ** -(h + 1) for h in range(8)]),
        (16, [2.0 ** (-(h + 1) / 2) for h in range(16)]),
        (1, [2.0**-8]),
        (6, [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]),
        (12, [2.0 ** -(h + 1) for h in range(8)] + [2.0 ** -(h + 0.5) for h in range(4)]),
    ],
)
def test_alibi_slopes(heads, slopes):
    assert [ws.ALiBi(heads).slope(0, h) for h in range(heads)] == pytest.approx(slopes, rel=1e-12)


def test_alibi(s):
    by_head = torch.rand(H)
    both = torch.rand(B, H)
    expected = torch.tensor([ws.ALiBi(H).slope(0, h) for h in range(H)], dtype=torch.float64)
    torch.testing.assert_close(applied(ws.ALiBi(H), s), s - expected.view(H, 1, 1) * distance())
    torch.testing.assert_close(applied(ws.ALiBi(by_head), s), s - by_head.double().view(H, 1, 1) * distance())
    torch.testing.assert_close(applied(ws.ALiBi(both), s), s - both.double().view(B, H, 1, 1) * distance())


def test_soft_cap(s):
    torch.testing.assert_close(applied(ws.SoftCap(3.0), s), 3 * torch.tanh(s / 3))


@pytest.mark.parametrize("shape", [(SQ, SK), (1, SK), (H, SQ, 1), (B, H, SQ, SK), (B, 1, 1, SK), (1, 1, 1, 1)])
def test_bias(s, shape):
    bias = torch.randn(shape, dtype=torch.float32, requires_grad=True)
    out = applied(ws.Bias(bias), s)
    torch.testing.assert_close(out, s + bias.double())
    out.sum().backward()
    assert bias.grad is not None
    torch.testing.assert_close(bias.grad, torch.full(shape, s.numel() / bias.numel()))


def test_chain_goes_left_to_right(s):
    chain = ws.SoftCap(3.0) | ws.ALiBi(H) | ws.SoftCap(5.0)
    assert chain == ws.SoftCap(3.0) | (ws.ALiBi(H) | ws.SoftCap(5.0))
    expected = applied(ws.SoftCap(5.0), applied(ws.ALiBi(H), applied(ws.SoftCap(3.0), s)))
    torch.testing.assert_close(applied(chain, s), expected)


def test_custom_score(s):
    table, bias = torch.rand(H), torch.rand(SQ, SK)

    def fn(s, b, h, q, k, table, bias, cut):
        s = where(k % 2 == 0, s * table[h], minimum(maximum(s, -cut), cut))
        return s + bias[q - 3, k] + tanh(exp(-abs(s))) * log(1.0 + b)

    clipped = torch.where(grid()["k"] % 2 == 0, s * table.double().view(H, 1, 1), s.clamp(-2, 2))
    late = torch.tanh(torch.exp(-clipped.abs())) * torch.log(1.0 + grid()["b"].double())
    score = ws.CustomScore(fn, table=table, bias=bias, cut=2.0)
    torch.testing.assert_close(applied(score, s), clipped + bias.double() + late)
    torch.testing.assert_close(score.apply(2.5, 1, 0, 4, 3), clipped.new_tensor(2.0) + bias[1, 3].double()
                               + math.tanh(math.exp(-2.0)) * math.log(2.0), check_dtype=False)  # fmt: skip


def test_results_are_floats(s):
    assert applied(ws.CustomScore(lambda s, b, h, q, k: q - k), s).equal(grid()["q"] - grid()["k"].double())
    assert applied(ws.CustomScore(lambda s, b, h, q, k: 0), s).item() == 0.0
    assert ws.CustomScore(lambda s, b, h, q, k: 1).program().out == ("const", "float", 1.0)


def test_eager_and_traced_agree(s):
    e = grid()
    lens = Lengths(SQ, SK)
    for score in (ws.ALiBi(H), ws.SoftCap(2.0), ws.Bias(torch.rand(SQ, SK).double()), ws.ALiBi(torch.rand(B, H))):
        eager = score.apply(s, e["b"], e["h"], e["q"], e["k"], lens)
        torch.testing.assert_close(eager, applied(score, s), rtol=1e-6, atol=1e-6)


def test_equality_and_program_cache():
    slopes = torch.rand(H)
    assert ws.ALiBi(8) | ws.SoftCap(2.0) == ws.ALiBi(8) | ws.SoftCap(2.0)
    assert ws.ALiBi(slopes) == ws.ALiBi(slopes)
    assert ws.ALiBi(slopes) != ws.ALiBi(slopes.clone())
    assert (ws.ALiBi(8) | ws.SoftCap(2.0)).program() is (ws.ALiBi(8) | ws.SoftCap(2.0)).program()
    assert ws.ALiBi(slopes).program() is not ws.ALiBi(slopes).program()
    assert ws.ALiBi(slopes).program().key == ws.ALiBi(slopes.clone()).program().key
    assert ws.SoftCap(2.0).program().key != ws.SoftCap(3.0).program().key


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ws.ALiBi(0), "slopes is 0"),
        (lambda: ws.ALiBi(2.0), "slopes is 2.0"),
        (lambda: ws.ALiBi(torch.ones(2, dtype=torch.int32)), "slopes is a torch.int32 tensor"),
        (lambda: ws.ALiBi(torch.ones(1, 2, 3)), r"shape \(1, 2, 3\)"),
        (lambda: ws.SoftCap(0.0), "cap is 0.0"),
        (lambda: ws.SoftCap(-1), "cap is -1"),
        (lambda: ws.SoftCap(math.nan), "cap is nan"),
        (lambda: ws.SoftCap(math.inf), "cap is inf"),
        (lambda: ws.SoftCap("30"), "cap is '30'"),
        (lambda: ws.Bias(torch.ones(3)), "bias is a torch.float32 tensor of shape"),
        (lambda: ws.Bias(torch.ones(3, 3, dtype=torch.bool)), "bias is a torch.bool tensor"),
        (lambda: ws.Bias(2.0), "bias is 2.0"),
        (lambda: ws.CustomScore(None), "CustomScore got None"),
        (lambda: ws.CustomScore(print, x=[1]), r"CustomScore captures x=\[1\]"),
        (lambda: ws.SoftCap(2.0) | 3, "a chain of scores got 3"),
        (lambda: ws.Score().program(), "score is a Score without apply; a score must define apply"),
    ],
)
def test_bad_parameters(make, message):
    with pytest.raises(AttentionError, match=message):
        make()


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda s, b, h, q, k: None, "returned None"),
        (lambda s, b, h, q, k: s < 3, "returned a symbol of dtype bool"),
        (lambda s, b, h, q, k: True, "returned a bool"),
        (lambda s, b, h, q, k: torch.ones(3), "returned a Tensor"),
        (lambda s, b, h, q, k: math.tanh(s), "use to_float, exp"),
        (lambda s, b, h, q, k: s if q > k else 0.0, "use & | ~ and where()"),
    ],
)
def test_bad_score_functions(fn, message):
    with pytest.raises(AttentionError) as caught:
        (ws.SoftCap(2.0) | ws.CustomScore(fn)).program()
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{Path(__file__)}:{fn.__code__.co_firstlineno}: ")
