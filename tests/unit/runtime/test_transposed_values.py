"""Values of 8 bits that come transposed, too: how they are made, who reads them, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import warpattn as wa
from tests.unit.runtime.card import make_card, misaligned  # noqa: F401 (a fixture)
from warpattn.problem import Call, validate
from warpattn.runtime.execute import _identify
from warpattn.runtime.plan import plan
from warpattn.sequences import Dense

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
V = torch.randn(2, 9, 2, 64)
Given = tuple[wa.Quantized, wa.Quantized, wa.Quantized]


def given(queries: int = 40, keys: int = 70, seed: int = 0) -> Given:
    generator = torch.Generator().manual_seed(seed)
    shapes = (queries, 4), (keys, 2), (keys, 2)
    q, k, v = (torch.randn(2, *shape, 64, generator=generator) for shape in shapes)
    return wa.quantize(q, per="head"), wa.quantize(k, per="head"), wa.quantize(v, per="head", transposed=True)


def without(x: wa.Quantized) -> wa.Quantized:
    return wa.Quantized(x.values, x.scale)


@pytest.mark.parametrize("keys", [0, 1, 31, 32, 70])
def test_places_of_keys(keys):
    """Of 16 keys, pairs of both halves take turns; places past the last key are 0."""
    x = torch.randn(2, keys, 3, 32)
    found, expected = wa.quantize(x, transposed=True), wa.quantize(x)
    across = found.transposed
    assert across is not None and across.is_contiguous() and across.shape == (2, 3, 32, -(-keys // 32) * 32)
    order = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    places = [first + i for first in range(0, across.shape[3], 16) for i in order]
    whole = torch.cat([expected.values.float(), torch.zeros(2, 32, 3, 32)], 1)
    assert torch.equal(across.float(), whole[:, places].permute(0, 2, 3, 1))
    assert torch.equal(found.dequantized(), expected.dequantized()) and expected.transposed is None


def test_all_else_reads_the_values():
    """Wrong ones make no difference to the reference, with gradients, to ragged batches and plans, nor in a graph."""
    q, k, v = given()
    wrong = replace(v, transposed=torch.full(v.transposed.shape, 3.0).to(E4M3))
    expected = wa.attention(q, k, without(v))
    assert torch.equal(wa.attention(q, k, wrong), expected)
    flat = [replace(x, values=x.values.flatten(0, 1)) for x in (q, k, wrong)]
    cu = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (40, 70)]
    assert torch.equal(wa.attention_varlen(*flat, wa.Ragged(*cu)), expected.flatten(0, 1))
    few = wa.Quantized(q.values[:, :1], q.scale)
    assert torch.equal(wa.DecodePlan(few, (k, wrong))(few, (k, wrong)), expected[:, :1])
    wide = q.dequantized().requires_grad_()
    out = wa.attention(wide, k, replace(v, transposed=torch.zeros(1)))  # queries of 16 bits or more do not look at it
    (found,) = torch.autograd.grad(out.sum(), wide)
    assert torch.equal(found, torch.autograd.grad(wa.attention(wide, k, without(v)).sum(), wide)[0])

    def graph(q, k, x):
        return wa.attention(wa.quantize(q), wa.quantize(k), wa.quantize(x, transposed=True))

    x = [each.dequantized() for each in (q, k, v)]
    assert torch.equal(torch.compile(graph, backend="eager", fullgraph=True)(*x), graph(*x))


@pytest.mark.parametrize(("x", "tail", "message"), [
    (V, {"dtype": E5M2}, r"dtype is torch\.float8_e5m2; transposed=True needs torch\.float8_e4m3fn"),
    (V, {"per": "token"}, "per is 'token'; transposed=True needs per to be 'tensor' or 'head'"),
    (V, {"scale": torch.ones(2, 9, 2)}, r"scale has shape \(2, 9, 2\); transposed=True needs a scale of shape"),
    (V[0], {}, r"x has shape \(9, 2, 64\); transposed=True needs \(batch, tokens, heads, head_dim\) with a"),
    (V[..., :40], {}, r"x has shape \(2, 9, 2, 40\); transposed=True needs"),
    (V, {"transposed": 1}, "transposed is 1; transposed must be True or False"),
])  # fmt: skip
def test_what_is_not_made(x, tail, message):
    with pytest.raises(wa.AttentionError, match=f"^{message}") as caught:
        wa.quantize(x, **{"transposed": True} | tail)
    assert len(caught.value.reasons) == 1


@pytest.mark.parametrize(("change", "message"), [
    (lambda x: x.view(E5M2), r"a torch\.float8_e5m2 tensor of shape \(2, 2, 64, 96\)"),
    (lambda x: x[..., :64].contiguous(), r"a torch\.float8_e4m3fn tensor of shape \(2, 2, 64, 64\)"),
    (lambda x: x.mT.contiguous().mT, r"a torch\.float8_e4m3fn tensor of shape \(2, 2, 64, 96\) with strides \("),
    (lambda x: 1.0, "1.0"),
])  # fmt: skip
def test_wrong_ones(change, message):
    q, k, v = given()
    rule = r"for v of shape \(2, 70, 2, 64\) it must be None or a contiguous torch\.float8_e4m3fn tensor of shape"
    with pytest.raises(wa.AttentionError, match=rf"^v\.transposed is {message}.*; {rule} \(2, 2, 64, 96\)$") as caught:
        wa.attention(q, k, replace(v, transposed=change(v.transposed)))
    assert len(caught.value.reasons) == 1


def test_a_plan_says_whether_values_are_transposed_before():
    q, k, v = given()
    lines = []
    for across in (None, v.transposed):
        sequence = Dense(k.scale, v.scale, q.scale, v_transposed=across)
        lines.append(str(plan(validate(Call(q.values, k.values, v.values, sequence, backend="simulate:sm90")).problem)))
    assert "sm90.transpose_values before it: 17,920 bytes" in lines[0] and "v brings" not in lines[0]
    assert "v brings its transposed values: no launch before it" in lines[1] and "transpose_values" not in lines[1]


def test_a_repeated_call_reads_its_own(card):
    """One launch a call, by the short way from the second on; a call without them is not the same."""
    for seed in range(3):
        q, k, v = given(seed=seed)
        out = wa.attention(q, k, v)
        assert len(card.launches) == seed + 1 and card.examined == 1
        assert card.launches[-1]["maps"] == [x.data_ptr() for x in (q.values, k.values, v.transposed, out)]
    keys = [_identify(Call(q.values, k.values, v.values, Dense(k.scale, v.scale, q.scale, v_transposed=across)))[0]
            for across in (None, v.transposed)]  # fmt: skip
    assert keys[0] != keys[1]
    apart = misaligned(v.transposed.view(torch.uint8)).view(E4M3)
    wa.attention(q, k, replace(v, transposed=apart))
    assert card.examined == 2 and card.launches[-1]["maps"][2] not in (apart.data_ptr(), v.transposed.data_ptr())
    bare = [wa.Quantized(x.values, None, x.transposed) for x in (q, k, v)]  # scales of 1
    for _ in range(2):
        wa.attention(*bare)
        assert card.launches[-1]["maps"][2] == v.transposed.data_ptr() and card.examined == 3


def test_the_output_is_elsewhere(card):
    q, k, v = given(queries=20)
    own = torch.empty(2, 20, 4, 64).bfloat16()
    for _ in range(2):
        wa.attention(q, k, v, out=own)
    shared = v.transposed.view(torch.bfloat16).flatten()[: own.numel()].view(own.shape)
    with pytest.raises(wa.AttentionError, match=r"^out starts at .*; out must not share memory with v\.transposed: "):
        wa.attention(q, k, v, out=shared)
