"""Calls that kernels serve by a copy or a broadcast: head dims between multiples of 8, scores that ignore a score."""

from __future__ import annotations

from itertools import product

import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from tests.drawn import drawn, each_once
from tests.oracle import Inputs, check
from warpattn.problem import Call, validate
from warpattn.runtime.plan import plan
from warpattn.sequences import Dense

ARCHS = ["sm90", "sm100", "gfx942", "gfx950"]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


ODD = [(40, 20, 20), (1, 59, 59), (40, 12, 33), (1, 1, 7)]


@pytest.mark.parametrize(
    ("arch", "rows", "dim", "dim_v"),
    drawn([(arch, *odd) for arch in ARCHS for odd in ODD],
          [("sm90", *ODD[3]), ("gfx942", *ODD[2]), ("gfx950", *ODD[1])]),
)  # fmt: skip
def test_head_dims_between_multiples_of_8(arch, rows, dim, dim_v):
    q, k, v = normal(1, rows, 4, dim), normal(1, 50, 2, dim), normal(1, 50, 2, dim_v)
    out, lse = wa.attention(q, k, v, mask=wa.Causal(), return_lse=True, backend=f"simulate:{arch}")
    assert out.shape == (1, rows, 4, dim_v) and out.is_contiguous()
    check(Inputs(q, k, v, mask=wa.Causal()), out, lse)


@pytest.mark.parametrize("arch", drawn(["sm90", "gfx942"], ["gfx942"]))
def test_such_head_dims_of_every_kind_and_an_output_of_any_strides(arch):
    backend, x = f"simulate:{arch}", normal(2, 12, 2, 20)
    out = torch.full((2, 2, 12, 24), torch.nan, dtype=x.dtype)
    view = out[..., :20].transpose(1, 2)
    assert wa.attention(x, x, x, out=view, backend=backend) is view
    check(Inputs(x, x, x), view)
    assert out[..., 20:].isnan().all()
    seq = wa.Ragged(torch.tensor([0, 5, 24], dtype=torch.int32))
    rows = x.flatten(0, 1)
    check(Inputs(rows, rows, rows, sequence=seq), wa.attention_varlen(rows, rows, rows, seq, backend=backend))
    table = torch.tensor([[0], [1]], dtype=torch.int32)
    kv = wa.PagedKV(x, x, table, torch.tensor([12, 3], dtype=torch.int32))
    check(Inputs(x[:, :1], x, x, sequence=kv), wa.attention_paged(x[:, :1], kv, backend=backend))


FLAT = {
    "constant": lambda b, h, q, k: 3,
    "head": lambda b, h, q, k: h,
    "row": lambda b, h, q, k: q * 0.1,
    "key": lambda b, h, q, k: k * 0.1,
}
SHAPES = list(product(["sm90", "sm100", "gfx942"], [1, 70]))


@pytest.mark.parametrize(
    ("arch", "rows", "name"),
    drawn(
        ((*x, name) for x, name in product(SHAPES, FLAT)),
        [(*x, name) for x, name in each_once(SHAPES, [*FLAT])[1::4]],
    ),
)
def test_scores_of_fewer_dimensions(arch, rows, name):
    score = FLAT[name]
    q, k, v = normal(1, rows, 2, 64), normal(1, 70, 2, 64), normal(1, 70, 2, 64)
    made = wa.CustomScore(lambda s, b, h, q, k: score(b, h, q, k))
    same = wa.CustomScore(lambda s, b, h, q, k: s * 0.0 + score(b, h, q, k))  # in the shape of the scores
    out, lse = wa.attention(q, k, v, score=made, return_lse=True, backend=f"simulate:{arch}")
    check(Inputs(q, k, v, score=same), out, lse)


def every_other(x: torch.Tensor) -> torch.Tensor:
    """The same elements with others between them."""
    return torch.stack([x, torch.full_like(x, 13)], -1).flatten(-2)[..., ::2]


STRIDED = ["decode", "pages", "ragged", "ragged over pages"]
KEPT = [("sm90", "decode"), ("gfx942", "pages"), ("gfx950", "ragged over pages")]


@pytest.mark.parametrize(("arch", "kind"), drawn(product(ARCHS, STRIDED), KEPT))
def test_lengths_tables_and_offsets_of_any_strides(arch, kind):
    """They have holes between their elements: a kernel that counts on none reads the wrong sequence."""
    pages, q, backend = normal(9, 16, 2, 64), normal(2, 20, 4, 64), f"simulate:{arch}"
    table = torch.tensor([[3, 1, 7, 0], [0, 2, 4, 5]], dtype=torch.int32)
    lengths, cu_q = torch.tensor([50, 17], dtype=torch.int32), torch.tensor([0, 1, 20], dtype=torch.int32)
    kv, spread = (wa.PagedKV(pages, pages, f(table), f(lengths)) for f in (torch.clone, every_other))
    assert spread.lengths.stride() == (2,) and torch.equal(spread.lengths, lengths)
    calls = {
        "decode": lambda kv, cu: wa.attention_paged(q[:, :1], kv, backend=backend),
        "pages": lambda kv, cu: wa.attention_paged(q, kv, backend=backend),
        "ragged": lambda kv, cu: wa.attention_varlen(q[0], q[0], q[0], wa.Ragged(cu), backend=backend),
        "ragged over pages": lambda kv, cu: wa.attention_paged(q[0], kv, wa.Ragged(cu), backend=backend),
    }
    assert torch.equal(calls[kind](spread, every_other(cu_q)), calls[kind](kv, cu_q))


@pytest.mark.full
def test_gradients_of_head_dims_between_multiples_of_8():
    given = [normal(1, 24, 2, dim).requires_grad_() for dim in (20, 20, 33)]
    again = [x.detach().float().requires_grad_() for x in given]
    change = normal(1, 24, 2, 33)
    wa.attention(*given, mask=wa.Causal(), backend="simulate:sm90").backward(change)
    wa.attention(*again, mask=wa.Causal()).backward(change.float())
    for x, exact in zip(given, again, strict=True):
        torch.testing.assert_close(x.grad.float(), exact.grad, atol=5e-2, rtol=2e-2)


def test_the_plan_says_that_head_dims_are_filled_up():
    words = "head dims 20/33 are no multiples of 8: q, k and v are copied, rows filled up with zeros to 24/40"
    assert words in plan_text(20, 33)
    assert "filled up" not in plan_text(24, 40)


def plan_text(dim: int, dim_v: int) -> str:
    q, v = normal(1, 8, 2, dim), normal(1, 8, 2, dim_v)
    return str(plan(validate(Call(q, q, v, Dense(), backend="simulate:sm90")).problem))
