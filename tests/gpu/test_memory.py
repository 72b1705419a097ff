"""Where tensors lie: layouts that TMA addresses or that are copied, outputs of the caller, offsets beyond 2^31."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import warpattn as wa
from tests.oracle import Inputs, check, poisoned
from warpattn.problem.operands import addressable

pytestmark = pytest.mark.gpu

B, S, H, D = 2, 260, 4, 64


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def misaligned(x: Tensor) -> Tensor:
    """The same values two bytes past a multiple of 16."""
    room = torch.empty(x.numel() + 8, device=x.device, dtype=x.dtype)
    return room[1 : 1 + x.numel()].view(x.shape).copy_(x)


LAYOUTS = {  # name: (how q, k, v are made, whether TMA reads them in place)
    "contiguous": (lambda: normal(B, S, H, D), True),
    "heads first": (lambda: normal(B, H, S, D).transpose(1, 2), True),
    "sequence first": (lambda: normal(S, B, H, D).transpose(0, 1), True),
    "heads of a packed qkv": (lambda: normal(B, S, 3, H, D)[:, :, 1], True),
    "columns of a packed qkv": (lambda: normal(B, S, H, 3 * D)[..., D : 2 * D], True),
    "every second row": (lambda: normal(B, 2 * S, H, D)[:, ::2], True),
    "some heads": (lambda: normal(B, S, 3 * H, D)[:, :, H : 2 * H], True),
    "batch expanded": (lambda: normal(1, S, H, D).expand(B, S, H, D), False),
    "heads expanded": (lambda: normal(B, S, 1, D).expand(B, S, H, D), False),
    "odd row stride": (lambda: normal(B, S, H, D + 3)[..., :D], False),
    "odd start": (lambda: normal(B, S, H, D + 8)[..., 3 : D + 3], False),
    "head dim outside": (lambda: normal(B, D, S, H).permute(0, 2, 3, 1), False),
    "reversed by flip": (lambda: normal(B, S, H, D).flip(1), True),
    "misaligned": (lambda: misaligned(normal(B, S, H, D)), False),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("operand", ["q", "k", "v", "all"])
def test_layouts(name, operand):
    make, in_place = LAYOUTS[name]
    tensors = {x: make() if operand in (x, "all") else normal(B, S, H, D) for x in "qkv"}
    assert all(addressable(x) for x in tensors.values()) == in_place
    for _ in range(2):  # the second call may go the short way
        out, lse = wa.attention(**tensors, mask=wa.Causal(), return_lse=True)
        assert out.is_contiguous()
        check(Inputs(**tensors, mask=wa.Causal()), out, lse)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if "expanded" not in name])
def test_outputs_of_the_caller(name):
    q, k, v = normal(B, S, H, D), normal(B, S, H, D), normal(B, S, H, D)
    for _ in range(2):
        out = LAYOUTS[name][0]()
        around = out._base if out._base is not None else out
        out.fill_(torch.nan)
        outside = around.isnan().logical_not()
        before = around[outside].clone()
        assert wa.attention(q, k, v, out=out) is out
        check(Inputs(q, k, v), out)
        assert torch.equal(around[outside], before), "something outside of out was written"


def test_strides_of_single_elements_do_not_matter():
    q = normal(1, 1, 1, D).as_strided((1, 1, 1, D), (3, 5, 7, 1))
    k = normal(1, S, 1, D).as_strided((1, S, 1, D), (1, D, 0, 1))
    assert addressable(q) and addressable(k)
    out = wa.attention(q, k, k)
    check(Inputs(q, k, k), out)


def test_a_misaligned_call_after_an_aligned_one():
    """Both have the same key of shapes and strides; the address decides."""
    x = normal(B, S, H, D)
    aligned = wa.attention(x, x, x)
    assert torch.equal(wa.attention(misaligned(x), x, x), aligned)
    assert torch.equal(wa.attention(x, x, misaligned(x)), aligned)
    out = misaligned(torch.zeros_like(x))
    assert torch.equal(wa.attention(x, x, x, out=out), aligned)
    again = poisoned(x.shape, x.dtype, x.device)
    assert torch.equal(wa.attention(x, x, x, out=again), aligned)


def test_captured_tensors_with_any_strides():
    bias = torch.randn(S, S, H, device="cuda").permute(2, 0, 1)
    ids = torch.randint(0, 3, (2 * S,), device="cuda")[::2]
    q, k, v = normal(B, S, H, D), normal(B, S, H, D), normal(B, S, H, D)
    inputs = Inputs(q, k, v, mask=wa.Document(ids), score=wa.Bias(bias))
    check(inputs, wa.attention(q, k, v, mask=inputs.mask, score=inputs.score))


def test_a_captured_tensor_that_changes_in_place():
    lengths = torch.tensor([10, 200], device="cuda", dtype=torch.int32)
    mask = wa.Padding(lengths)
    q, k, v = normal(B, S, H, D), normal(B, S, H, D), normal(B, S, H, D)
    for value in (10, 200, 0, S):
        lengths.fill_(value)
        check(Inputs(q, k, v, mask=mask), wa.attention(q, k, v, mask=mask))


def test_strides_beyond_2_to_the_31():
    """K and V as views into one buffer of 5 GB, their batches 4.3 GB apart."""
    step = 2**31 + 64
    buffer = torch.empty(step + 4 * S * H * D, device="cuda", dtype=torch.bfloat16)
    pair = buffer.as_strided((2, B, S, H, D), (2 * S * H * D, step, H * D, D, 1))
    k, v = pair[0].copy_(normal(B, S, H, D)), pair[1].copy_(normal(B, S, H, D))
    q = normal(B, S, H, D)
    out, lse = wa.attention(q, k, v, mask=wa.Causal(), return_lse=True)
    check(Inputs(q, k, v, mask=wa.Causal()), out, lse)


def test_tensors_beyond_2_to_the_31_elements():
    """q, k, v, out of more than 2^31 elements; a window keeps the time short. The outer rows and heads are compared."""
    seq, heads, dim, window = 2**17 + 40, 128, 128, 100
    q, k, v = (torch.empty(1, seq, heads, dim, device="cuda", dtype=torch.bfloat16).normal_() for _ in range(3))
    assert q.numel() > 2**31
    mask = wa.SlidingWindow(window)
    out, lse = wa.attention(q, k, v, mask=mask, out=torch.full_like(q, torch.nan), return_lse=True)
    for rows, keys in ((slice(-300, None), slice(-600, None)), (slice(0, 300), slice(0, 300))):
        for h in (0, heads - 1):
            head = slice(h, h + 1)
            part = Inputs(q[:, rows, head], k[:, keys, head], v[:, keys, head], mask=mask)
            check(part, out[:, rows, head], lse[:, head, rows])
    assert not any(bool(chunk.isnan().any()) for chunk in out.split(8192, dim=1))


def test_a_captured_tensor_beyond_2_to_the_31_elements():
    """Bias rows near the end lie past 2^31 elements."""
    seq = 47_000
    bias = torch.empty(seq, seq, device="cuda", dtype=torch.bfloat16).normal_()
    assert bias.numel() > 2**31
    q, k, v = normal(1, 256, 1, D), normal(1, seq, 1, D), normal(1, seq, 1, D)
    queries = torch.cat([torch.zeros(1, seq - 256, 1, D, device="cuda", dtype=torch.bfloat16), q], dim=1)
    out = wa.attention(queries, k, v, score=wa.Bias(bias), mask=wa.Causal())
    check(Inputs(q, k, v, score=wa.Bias(bias[-256:]), mask=wa.Causal()), out[:, -256:])
