"""Problems with nothing to do: no sequences, no heads, no rows, no keys. Results are empty or 0, before any launch."""

from __future__ import annotations

import pytest
import torch

import warpattn as wa
from warpattn.runtime import simulate
from warpattn.serving import append_paged

H, D = 2, 16
BACKENDS = ["reference", "simulate:sm90", "simulate:sm100", "simulate:gfx942"]


@pytest.fixture(autouse=True)
def _no_launch(monkeypatch):
    monkeypatch.setattr(simulate, "run_launch", lambda *_: pytest.fail("a launch"))


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(torch.float16)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# (batch, queries, keys, query heads, key heads)
EMPTY = [(0, 4, 4, H, H), (2, 0, 4, H, H), (2, 4, 0, H, H), (2, 4, 4, 0, 0), (2, 4, 4, 0, H), (0, 0, 0, 0, 0)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", EMPTY, ids=str)
@pytest.mark.parametrize("sinks", [False, True])
def test_dense(backend, sizes, sinks):
    batch, rows, keys, heads, key_heads = sizes
    q, k, v = normal(batch, rows, heads, D), normal(batch, keys, key_heads, D), normal(batch, keys, key_heads, 8)
    logits = torch.arange(heads).float() if sinks else None
    out, lse = wa.attention(q, k, v, mask=wa.Causal(), sinks=logits, return_lse=True, backend=backend)
    assert out.shape == (batch, rows, heads, 8) and out.dtype == q.dtype and not out.any()
    expected = torch.full((batch, heads, rows), -torch.inf) if logits is None else logits[None, :, None].expand_as(lse)
    assert lse.dtype == torch.float32 and torch.equal(lse, expected)
    given = torch.full_like(out, torch.nan)
    assert wa.attention(q, k, v, out=given, backend=backend) is given and not given.any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("starts", "heads"), [((0,), H), ((0, 0, 0), H), ((0, 3, 5), 0)])
def test_ragged(backend, starts, heads):
    q = normal(starts[-1], heads, D)
    out, lse = wa.attention_varlen(q, q, q, wa.Ragged(ints(*starts)), return_lse=True, backend=backend)
    assert out.shape == q.shape and lse.shape == (heads, len(q))


@pytest.mark.parametrize("backend", BACKENDS)
def test_ragged_without_keys(backend):
    q, k = normal(5, H, D), normal(0, H, D)
    out = wa.attention_varlen(q, k, k, wa.Ragged(ints(0, 3, 5), ints(0, 0, 0)), backend=backend)
    assert out.shape == q.shape and not out.any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", [(0, 2, 3, H), (2, 0, 3, H), (2, 2, 3, 0), (0, 0, 0, 0)], ids=str)
def test_paged(backend, sizes):
    batch, columns, pages, heads = sizes
    cache = normal(pages, 4, heads, D)
    kv = wa.PagedKV(cache, cache, torch.zeros(batch, columns, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32))
    out = wa.attention_paged(normal(batch, 1, heads, D), kv, backend=backend)
    assert out.shape == (batch, 1, heads, D) and not out.any()


@pytest.mark.parametrize("sizes", EMPTY, ids=str)
def test_gradients_are_zeros(sizes):
    batch, rows, keys, heads, key_heads = sizes
    shapes = (batch, rows, heads, D), (batch, keys, key_heads, D), (batch, keys, key_heads, D)
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    wa.attention(*inputs).sum().backward()
    for x in inputs:
        assert x.grad is not None and x.grad.shape == x.shape and not x.grad.any()


WITHOUT_PAIRS = ((0, 2, 3), (2, 0, 3), (2, 3, 0))
NOTHING_READ = [(backend, sizes) for backend in ("reference", "simulate:sm90") for sizes in WITHOUT_PAIRS]


@pytest.mark.parametrize(("backend", "sizes"), [*NOTHING_READ, ("reference", (2, 3, 3))], ids=str)
def test_gradients_of_what_nothing_reads_are_zeros(backend, sizes):
    """Tensors of a score, of each number of dimensions, where nothing is visible: no parameter is without gradient."""
    batch, rows, keys = sizes
    q, k = torch.randn(batch, rows, H, D).half(), torch.randn(batch, keys, H, D).half()
    slopes, number = torch.rand(H, requires_grad=True), torch.rand((), requires_grad=True)
    score = wa.ALiBi(slopes) | wa.CustomScore(lambda s, b, h, q, k, t: s * t[()], t=number)
    hidden = wa.Padding(torch.zeros(batch, dtype=torch.int32))
    for taken in (0, 1):
        result = wa.attention(q, k, k, mask=hidden, score=score, return_lse=True, backend=backend)[taken]
        for grad in torch.autograd.grad(result, (slopes, number), torch.zeros_like(result)):
            assert grad is not None and not grad.any()


@pytest.mark.parametrize("sizes", EMPTY, ids=str)
def test_decode_plans(sizes):
    batch, rows, keys, heads, key_heads = sizes
    q, k = normal(batch, rows, heads, D), normal(batch, keys, key_heads, D)
    out, lse = wa.DecodePlan(q, (k, k), return_lse=True)(q, (k, k))
    assert out.shape == q.shape and not out.any() and lse.shape == (batch, heads, rows)


def test_a_prefill_plan_for_rows_that_are_missing():
    x, seq = normal(8, H, D), wa.Ragged(ints(0, 3, 8))
    plan = wa.PrefillPlan(x, x, x, seq)
    assert plan(x[:0], x[:0], x[:0], wa.Ragged(ints(0, 0, 0))).shape == (0, H, D)
    empty = wa.PrefillPlan(x[:0], x[:0], x[:0], wa.Ragged(ints(0)))
    assert empty(x[:0], x[:0], x[:0], wa.Ragged(ints(0))).shape == (0, H, D)


def test_append_nothing():
    cache = normal(3, 4, H, D)
    before = cache.clone()
    for batch, tokens in ((0, 1), (2, 0)):
        new = normal(batch, tokens, H, D)
        append_paged(cache, cache.clone(), torch.zeros(batch, 2, dtype=torch.int32), ints(*[1] * batch), new, new)
    append_paged(cache, cache.clone(), torch.zeros(2, 0, dtype=torch.int32), ints(0, 0), *[normal(2, 1, H, D)] * 2)
    assert torch.equal(cache, before)


@pytest.mark.parametrize("sizes", EMPTY, ids=str)
def test_compiled_graphs(sizes):
    batch, rows, keys, heads, key_heads = sizes
    q, k = normal(batch, rows, heads, D), normal(batch, keys, key_heads, D)
    compiled = torch.compile(lambda q, k: wa.attention(q, k, k, return_lse=True), fullgraph=True, backend="eager")
    for found, wanted in zip(compiled(q, k), wa.attention(q, k, k, return_lse=True), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("shape", [(2, 4, 0), (2, 3, 4, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("per", [64, 128])
def test_blocks_of_no_columns(shape, per):
    x = torch.zeros(shape)
    with pytest.raises(wa.AttentionError, match=f"^x has head_dim 0; per={per} needs a multiple of {per} above 0$"):
        wa.quantize(x, per=per)
    if len(shape) > 2:
        with pytest.raises(wa.AttentionError, match=r"^scale has shape .*; for x of shape"):
            wa.quantize(x, scale=x)
