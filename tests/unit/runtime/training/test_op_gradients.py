"""Gradients of compiled graphs, of the operator and through selective checkpointing are those of eager calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import warpattn as wa
from tests.cases import SCORES, Case
from tests.drawn import drawn
from tests.gradients import captured_floats
from tests.unit.api.test_gradients import attend, require
from tests.unit.runtime.training.gradient_double import install
from warpattn.runtime.torch_op import operators, program

CASE = Case(seq_q=21, seq_k=25, heads_q=4, heads_kv=2, dim_v=24, sinks=True)
SIM = "simulate:sm90"


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def compiled(fn: Callable[..., Any], backend: str = "aot_eager") -> Callable[..., Any]:
    return torch.compile(fn, fullgraph=True, backend=backend)


def gradients(fn: Callable[..., Any], leaves: list[Tensor]) -> list[Tensor]:
    out, lse = fn()
    generator = torch.Generator().manual_seed(3)
    along = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in (out, lse)]
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    return list(torch.autograd.grad((out, lse), leaves, along, allow_unused=True))


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def compare(case: Case, backend: str = "auto") -> None:
    inputs = require(case.build())
    leaves = [inputs.q, inputs.k, inputs.v, inputs.sinks, *captured_floats(inputs, 99)]
    expected = gradients(lambda: attend(inputs, backend), leaves)
    assert any((x != 0).any() for x in expected)
    fn = compiled(lambda inputs: attend(inputs, backend))
    for _ in range(2):
        close(gradients(lambda: fn(inputs), leaves), expected)


@pytest.mark.parametrize("score", drawn(SCORES, ["custom", "alibi-slopes"]))
def test_scores(score):
    compare(replace(CASE, mask="causal", score=score))


@pytest.mark.parametrize("mask", drawn(["padding", "added-mask", "documents", "custom"], ["added-mask", "custom"]))
def test_masks(mask):
    compare(replace(CASE, mask=mask))


def test_ragged():
    compare(replace(CASE, kind="ragged", batch=3, lens_q=(5, 0, 9), lens_k=(9, 3, 40), mask="causal", score="custom"))


def test_kernels(monkeypatch):
    double = install(monkeypatch)
    compare(replace(CASE, dtype=torch.bfloat16, mask="causal", score="none"), SIM)
    assert double.backwards == 3
    assert not double.checked.deterministic


PACKED = {
    "qkv": lambda x: wa.attention(*x.unbind(2), mask=wa.Causal(), backend=SIM),
    "kv": lambda x: wa.attention(x[:, :, 0], *x[:, :, 1:].contiguous().unbind(2), backend=SIM),
    "ragged": lambda x: wa.attention_varlen(*x[0].unbind(1), wa.Ragged(PARTS, max_q=7), backend=SIM),
}
PARTS = torch.tensor([0, 5, 12], dtype=torch.int32)


@pytest.mark.parametrize("name", PACKED)
def test_parts_of_one_tensor(name, monkeypatch):
    """An operator's results share no memory, unlike gradients outside of graphs."""
    double = install(monkeypatch)
    x = torch.randn(2, 12, 3, 4, 16).bfloat16().requires_grad_()
    calls = (PACKED[name], compiled(PACKED[name]), lambda x: saving(PACKED[name], x))
    expected, *found = [torch.autograd.grad(call(x).float().square().sum(), x)[0] for call in calls]
    assert double.backwards == 3
    for gradient in found:
        assert torch.equal(gradient, expected)


def saving(call, x):  # type: ignore[no-untyped-def]
    """A call under selective checkpointing that keeps its results."""
    kept = partial(create_selective_checkpoint_contexts, [torch.ops.warpattn.attention.default])
    return checkpoint(call, x, use_reentrant=False, context_fn=kept)


@pytest.mark.filterwarnings("ignore")
def test_inductor():
    try:
        fn = compiled(lambda q, k, v, gain: wa.attention(
            q, k, v, mask=wa.Causal(),
            score=wa.CustomScore(lambda s, b, h, q, k, gain: s * gain[h], gain=gain)) * 2, "inductor")  # fmt: skip
        inputs = require(replace(CASE, sinks=False).build())
        gain = torch.rand(4, requires_grad=True)
        leaves = [inputs.q, inputs.k, inputs.v, gain]
        found = torch.autograd.grad(fn(*leaves).square().sum(), leaves)
    except Exception as error:
        if "No working C++ compiler" in str(error):
            pytest.skip(f"inductor has no C++ compiler here: {str(error).splitlines()[0]}")
        raise
    score = wa.CustomScore(lambda s, b, h, q, k, gain: s * gain[h], gain=gain)
    out = wa.attention(inputs.q, inputs.k, inputs.v, mask=wa.Causal(), score=score) * 2
    close(list(found), list(torch.autograd.grad(out.square().sum(), leaves)))


def test_a_graph_serves_calls_with_and_without_gradients():
    inputs = replace(CASE, sinks=False).build()
    fn = compiled(lambda q, k, v: wa.attention(q, k, v, mask=wa.Causal()))
    plain = fn(inputs.q, inputs.k, inputs.v)
    assert not plain.requires_grad
    leaves = [x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out = fn(*leaves)
    assert torch.equal(out.detach(), plain)
    out.sum().backward()
    assert all(x.grad is not None and (x.grad != 0).any() for x in leaves)
    with torch.no_grad():
        assert not fn(*leaves).requires_grad


def test_limits_are_errors_when_the_graph_runs():
    leaves = [x.bfloat16().requires_grad_() for x in (torch.randn(1, 8, 2, 136),) * 3]
    fn = compiled(lambda q, k, v: wa.attention(q, k, v, backend="simulate:gfx942"))
    with pytest.raises(wa.AttentionError, match="backward of the gfx942 backend takes head dims up to 128"):
        fn(*leaves)


@pytest.mark.parametrize("save", [True, False])
def test_selective_checkpointing(save, monkeypatch):
    """The operator can be listed among those whose results are kept, and is then not run again."""
    double = install(monkeypatch)
    forwards = []
    run = operators.execute.attend
    monkeypatch.setattr(operators.execute, "attend", lambda call: (forwards.append(call), run(call))[1])
    inputs = require(replace(CASE, dtype=torch.bfloat16, sinks=False).build())
    leaves = [inputs.q, inputs.k, inputs.v]
    expected = torch.autograd.grad(wa.attention(*leaves, backend=SIM).float().square().sum(), leaves)
    forwards.clear()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        listed = save and op is torch.ops.warpattn.attention.default
        return CheckpointPolicy.MUST_SAVE if listed else CheckpointPolicy.PREFER_RECOMPUTE

    out = checkpoint(
        lambda q, k, v: wa.attention(q, k, v, backend=SIM) * 1.0,
        *leaves,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    found = torch.autograd.grad(out.float().square().sum(), leaves)
    assert len(forwards) == (1 if save else 2)
    assert double.backwards == 2
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


def test_the_operators_keep_their_promises():
    q, k, v = (torch.randn(2, n, h, 16, requires_grad=True) for n, h in ((9, 4), (11, 2), (11, 2)))
    sinks, gain = torch.randn(4, requires_grad=True), torch.rand(4, requires_grad=True)
    score = wa.CustomScore(lambda s, b, h, q, k, gain: s * gain[h], gain=gain).program()
    text = repr((wa.Causal().program().key, score.key, (0.25, True, "auto", None), ("dense", (), ())))
    torch.library.opcheck(operators._attention, (q, k, v, sinks, [], [], [gain], text))
    out, lse = (x.detach() for x in operators._attention(q, k, v, sinks, [], [], [gain], text))
    plain = [x.detach() for x in (q, k, v)]
    along = [torch.randn_like(out), torch.randn_like(lse)]
    args = (along, [*plain, out, lse], sinks.detach(), [], [], [gain.detach()], text, [True, True])
    torch.library.opcheck(operators._attention_backward, args)


@pytest.mark.parametrize("backend", ["auto", SIM])
def test_gradients_are_laid_out_as_graphs_expect(backend, monkeypatch):
    """Those of transposed tensors and of a bias that is a view: what inductor compiles the rest of a graph for."""
    install(monkeypatch)
    like = {"q": (2, 4, 9, 16), "k": (2, 2, 11, 16), "v": (2, 2, 11, 24)}
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16).transpose(1, 2) for shape in like.values())
    bias = torch.randn(11, 9).t()
    program = wa.Bias(bias).program()
    text = repr((wa.Causal().program().key, program.key, (0.25, True, backend, None), ("dense", (), ())))
    sinks = torch.zeros(4, dtype=torch.bfloat16)
    out, lse = operators._attention(q, k, v, sinks, [], [], [bias], text)
    args = ([torch.randn_like(out), torch.randn_like(lse)], [q, k, v, out, lse], sinks, [], [], [bias], text)
    found = operators._attention_backward(*args, [True, True])
    expected = operators._fake_backward(*args, [True, True])
    assert [(x.stride(), x.dtype) for x in found] == [(x.stride(), x.dtype) for x in expected] and len(found) == 5
    assert found[0].stride() == q.stride() and not q.is_contiguous()


def test_the_text_of_a_call_can_be_read():
    q = torch.zeros(1, 3, 2, 8)
    call = operators.Call(q, q, q, wa.Dense(), wa.Causal(), wa.SoftCap(2.0), None, 0.5, False, None, "auto", True)
    text = program.write(call, operators.validate(call), True)
    parsed = program.read(text, (), ())
    assert parsed.tail == (0.5, True, "auto", True) and parsed.sequence == ("dense", (), ())
    assert parsed.mask.program().key == wa.Causal().program().key
    assert program.has_lse(text) and parsed is program.read(text, (), ())


@pytest.mark.parametrize("ragged", [False, True])
def test_pages_have_gradients(ragged):
    q, pages = torch.randn(2, 3, 4, 16, requires_grad=True), torch.randn(6, 4, 2, 16, requires_grad=True)
    table, lengths = torch.tensor([[5, 1, 99], [2, 3, 4]]).int(), torch.tensor([7, 10]).int()

    def call():
        kv = wa.PagedKV(pages, pages * 2, table, lengths)
        seq = wa.Ragged(torch.tensor([0, 1, 3]).int()) if ragged else None
        return wa.attention_paged(q[0] if ragged else q, kv, seq, mask=wa.Causal(), return_lse=True)

    expected = gradients(call, [q, pages])
    assert (expected[1] != 0).any()
    close(gradients(compiled(call), [q, pages]), expected)
