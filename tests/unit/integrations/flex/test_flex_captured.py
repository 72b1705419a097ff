"""Tensors that FlexAttention's functions capture: what they compute of them, their gradients, rows and parameters."""

import pytest
import torch
from torch.nn.attention import flex_attention as flex

import warpattn as wa
from warpattn.integrations.flex import flex_attention, score_of

Q, K, V = (torch.randn(2, 2, 8, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3))


@pytest.fixture(autouse=True)
def _eager(monkeypatch):
    """FlexAttention itself, uncompiled and without a warning about it."""
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def test_numbers_that_the_function_reads_one_after_the_other():
    """The second temporary tensor may have the id of the first."""
    pair = torch.tensor([1.0, 5.0])

    def score(s, b, h, q, k):
        return s * pair[0] + k * pair[1] + h * pair.sum() + q * k * pair.prod()

    expected = flex.flex_attention(Q, K, V, score_mod=score)
    for _ in range(10):
        torch.testing.assert_close(flex_attention(Q, K, V, score_mod=score), expected)


def test_rows_of_a_captured_tensor_end():
    spans = torch.tensor([[0, 5], [2, 8]])

    def visible(b, h, q, k):
        first, last = spans[b]
        return (k >= first) & (k < last)

    def score(s, b, h, q, k):
        return s * sum(row for row in spans[h]) + len(spans[h])

    expected = flex.flex_attention(Q, K, V, score_mod=lambda s, b, h, q, k: s * (spans[h, 0] + spans[h, 1]) + 2,
                                   block_mask=flex.create_block_mask(visible, 2, 2, 8, 8, device="cpu"))  # fmt: skip
    torch.testing.assert_close(flex_attention(Q, K, V, score_mod=score, block_mask=visible), expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16], ids=str)
def test_narrow_integers_wrap_around(dtype):
    table = torch.tensor([3, 100, 119, 127, 0, 1, 77, 90]).to(dtype)
    number = torch.tensor(99).to(dtype)

    def score(s, b, h, q, k):
        u, v = table[q], table[k]
        values = (u - v, u + v, u * v, -u, 1 - u, (u - v).abs(), u << 3, ~u, number - u, torch.where(q > k, u, v) + 90,
                  torch.minimum(u, v) * 2, u + k, u.int() - v, u.long() * v, (q - 2 * k).to(dtype), (u - v) // 3,
                  u * 1.5 - v, (u + v).float() - v, torch.add(input=u, other=v) - 99, (u - v) * True, u**3)  # fmt: skip
        return s + sum(((value * 0.125 + i) % 7) * 0.01 * (i + 1) for i, value in enumerate(values))

    expected = flex.flex_attention(Q, K, V, score_mod=score)
    torch.testing.assert_close(flex_attention(Q, K, V, score_mod=score), expected)


def test_isin_compares_with_each_element():
    """torch's own warns in FlexAttention."""
    few, table = torch.tensor([1, 5]), torch.tensor([[0, 3], [2, 6]])

    def listed(b, h, q, k):
        return torch.isin(k, few) | torch.isin(k, table[h]) | (q == 0)

    def turned_if_listed(s, b, h, q, k):
        return torch.where(torch.isin(q, table, invert=True), s, -s)

    def one_of(b, h, q, k):
        return (k == 1) | (k == 5) | (k == table[h, 0]) | (k == table[h, 1]) | (q == 0)

    def turned(s, b, h, q, k):
        return torch.where((q == 0) | (q == 3) | (q == 2) | (q == 6), -s, s)

    mask = flex.create_block_mask(one_of, 2, 2, 8, 8, device="cpu")
    expected = flex.flex_attention(Q, K, V, score_mod=turned, block_mask=mask)
    torch.testing.assert_close(flex_attention(Q, K, V, turned_if_listed, listed), expected)


LEARNED = {
    "number": lambda p, row: lambda s, b, h, q, k: s * p,
    "function of it": lambda p, row: lambda s, b, h, q, k: s * p.exp() + k * torch.tanh(p * 2) / p,
    "elements": lambda p, row: lambda s, b, h, q, k: s * row[0] + row[-1] * row[h] * k,
    "all elements": lambda p, row: lambda s, b, h, q, k: s * sum(x for x in row) + row.unbind()[1] * k,
    "without a gradient": lambda p, row: lambda s, b, h, q, k: s * row.detach().softmax(-1)[h] * p,
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", LEARNED)
def test_parameters_of_a_converted_score_get_gradients_whatever_the_first_call_was(name, mode):
    p, row = (torch.nn.Parameter(torch.tensor(x)) for x in (0.7, [0.5, 1.5]))
    score = LEARNED[name](p, row)
    converted = score_of(score)
    with mode():
        first = flex_attention(Q, K, V, score_mod=converted)
    for _ in range(2):
        out, expected = (flex_attention(Q, K, V, score_mod=each) for each in (converted, score))
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(out, first)
        mine, wanted = (torch.autograd.grad(x.square().sum(), (p, row), allow_unused=True) for x in (out, expected))
        assert any(x is not None for x in wanted)
        torch.testing.assert_close([x for x in mine if x is not None], [x for x in wanted if x is not None])


def test_parameters_of_a_converted_score_may_get_other_memory():
    p = torch.nn.Parameter(torch.tensor(0.5))
    converted = score_of(lambda s, b, h, q, k: s * p)
    flex_attention(Q, K, V, score_mod=converted)
    p.data = torch.tensor(3.0)
    expected = flex.flex_attention(Q, K, V, score_mod=lambda s, b, h, q, k: s * 3.0)
    torch.testing.assert_close(flex_attention(Q, K, V, score_mod=converted), expected)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("function", "name"), [(lambda x: x.softmax(-1)[0, 1], "softmax"), (lambda x: x.T[0, 0], "T")])
def test_what_a_converted_score_would_compute_once_of_a_parameter_is_refused(function, name, mode):
    row = torch.nn.Parameter(torch.tensor([[0.5, 1.5]]))

    def score(s, b, h, q, k):
        return s * function(row)

    with mode(), pytest.raises(wa.AttentionError, match=f"torch's {name} of a tensor that requires a gradient"):
        flex_attention(Q, K, V, score_mod=score_of(score))
    for _ in range(2):  # each call runs the function itself
        assert torch.autograd.grad(flex_attention(Q, K, V, score_mod=score).square().sum(), row)[0].any()
