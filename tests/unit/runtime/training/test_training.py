"""Gradients of calls that kernels run, with a double for the kernels: what autograd is handed, saved and told."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import warpattn as wa
from tests import cases
from tests.cases import SCORES, Case
from tests.gradients import check_gradients, weights
from tests.unit.api.test_gradients import attend, require, taken
from tests.unit.runtime.training.gradient_double import Double, install
from warpattn.problem.backends import LIMITS, BackwardLimits
from warpattn.runtime.training import captured

BASE = Case(batch=2, seq_q=21, seq_k=25, heads_q=4, heads_kv=2, dim=16, dim_v=24, dtype=torch.bfloat16)
SIM = "simulate:sm90"


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Double:
    return install(monkeypatch)


def compare(case: Case, with_lse: bool = True) -> None:
    inputs = require(case.build())
    dout, dlse = weights(inputs)
    dlse = dlse if with_lse else None
    check_gradients(inputs, taken(inputs, attend(inputs, SIM), dout, dlse), dout, dlse)


@pytest.mark.parametrize("score", SCORES)
def test_scores_and_what_they_captured(score, double):
    compare(replace(BASE, mask="causal", score=score, sinks=True))
    assert double.backwards == 1


@pytest.mark.parametrize("mask", ["added-mask", "window", "documents", "nothing"])
def test_masks(mask, double):
    compare(replace(BASE, mask=mask, score="custom"))


MORE = [replace(case, mask="causal", score="custom", sinks=True) for case in cases.ragged(BASE)]
MORE += [*cases.every_head_count(replace(BASE, score="bias-heads")), *cases.every_layout(BASE)]
MORE += [replace(BASE, seq_q=0), replace(BASE, seq_k=0, sinks=True), replace(BASE, seq_q=1, seq_k=1)]


@pytest.mark.parametrize("case", MORE, ids=lambda case: case.name)
def test_more(case, double):
    compare(case)


def test_without_the_lse(double):
    compare(replace(BASE, mask="causal", sinks=True), with_lse=False)


def leaves(**more: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs = require(replace(BASE, **more).build())
    return inputs.q, inputs.k, inputs.v


def test_only_the_lse_is_used(double):
    q, k, v = leaves()
    _, lse = wa.attention(q, k, v, return_lse=True, backend=SIM)
    expected = torch.autograd.grad(wa.attention(q, k, v, return_lse=True)[1].sum(), (q, k), retain_graph=True)
    found = torch.autograd.grad(lse.sum(), (q, k))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_nothing_is_saved_without_gradients(double):
    q, k, v = leaves()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: pytest.fail("a tensor is saved"), lambda x: x):
        with torch.no_grad():
            assert not wa.attention(q, k, v, backend=SIM).requires_grad
        assert not wa.attention(q.detach(), k.detach(), v.detach(), backend=SIM).requires_grad


def test_gradients_come_only_where_they_are_wanted(double):
    q, k, v = leaves()
    out = wa.attention(q.detach(), k, v.detach(), backend=SIM)
    (dk,) = torch.autograd.grad(out.float().sum(), k)
    assert dk.shape == k.shape
    sinks = torch.randn(4)
    out = wa.attention(q, k, v, sinks=sinks, backend=SIM)
    out.float().sum().backward()
    assert double.last.dsinks is None and sinks.grad is None


def test_a_mask_that_only_hides_gives_its_tensors_no_gradient(double):
    q, k, v = leaves()
    limit = torch.rand(4, requires_grad=True)
    mask = wa.CustomMask(lambda b, h, q, k, limit: k * 0.05 < limit[h], limit=limit)
    wa.attention(q, k, v, mask=mask, backend=SIM).float().sum().backward()
    assert limit.grad is None
    assert not wa.attention(q.detach(), k.detach(), v.detach(), mask=mask, backend=SIM).requires_grad


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant, double):
    q, k, v = leaves()
    found = []
    for run in (lambda *x: wa.attention(*x, mask=wa.Causal(), backend=SIM) * 2,):
        found.append(torch.autograd.grad(run(q, k, v).float().square().sum(), (q, k, v)))
        again = [x.detach().requires_grad_() for x in (q, k, v)]
        checkpoint(run, *again, use_reentrant=reentrant).float().square().sum().backward()
        found.append([x.grad for x in again])
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


def test_saved_tensors_may_be_offloaded(double):
    q, k, v = leaves()
    gain = torch.rand(4, requires_grad=True)
    score = wa.CustomScore(lambda s, b, h, q, k, gain: s * gain[h], gain=gain)

    def run(hooks: Any) -> tuple[Tensor, ...]:
        with hooks:
            out = wa.attention(q, k, v, score=score, backend=SIM)
        return torch.autograd.grad(out.float().square().sum(), (q, k, v, gain))

    plain, packed = run(nullcontext()), run(torch.autograd.graph.save_on_cpu())
    for mine, theirs in zip(packed, plain, strict=True):
        assert torch.equal(mine, theirs)


def test_a_tensor_that_changed_in_between_is_an_error(double):
    q, k, v = leaves()
    gain = torch.rand(4)
    score = wa.CustomScore(lambda s, b, h, q, k, gain: s * gain[h], gain=gain)
    out = wa.attention(q, k, v, score=score, backend=SIM)
    gain.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.float().sum().backward()


MASKS_OF_TENSORS = {
    "a table": (lambda t: wa.CustomMask(lambda b, h, q, k, t: t[k] > 0, t=t), torch.arange(25) % 3),
    "lengths": (wa.Padding, torch.tensor([9, 25])),
    "short lengths": (lambda t: ~wa.Padding(t) | wa.Causal(), torch.tensor([9, 25], dtype=torch.int32)),
    "keys": (wa.Materialized, torch.arange(50).view(2, 1, 25) % 3 > 0),
}


@pytest.mark.parametrize("name", MASKS_OF_TENSORS)
def test_a_mask_that_changed_in_between_is_one_sentence(name, double):
    of, tensor = MASKS_OF_TENSORS[name]
    tensor = tensor.clone()
    q, k, v = leaves()
    out = wa.attention(q, k, v, mask=of(tensor.expand(2, 21, 25) if name == "keys" else tensor), backend=SIM)
    tensor.add_(1) if tensor.dtype != torch.bool else tensor.logical_not_()
    with pytest.raises(wa.AttentionError, match=r"a tensor of the mask \(.*\) has been changed in place since the"):
        out.float().sum().backward()
    assert double.backwards == 0


@pytest.mark.parametrize("name", ["cu_q", "cu_k"])
def test_offsets_that_changed_in_between_are_one_sentence(name, double):
    q, k, v = (torch.randn(20, heads, 16, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2))
    given = {name: torch.tensor([0, 7, 20], dtype=torch.int32) for name in ("cu_q", "cu_k")}
    out = wa.attention_varlen(q, k, v, wa.Ragged(**given, max_q=20, max_k=20), backend=SIM)
    given[name][1] = 9
    with pytest.raises(wa.AttentionError, match=f"seq.{name} has been changed in place since the forward; .* a clone"):
        out.float().sum().backward()
    assert double.backwards == 0


@torch.inference_mode()
def lengths_of_inference() -> Tensor:
    return torch.tensor([9, 25])


def test_tensors_of_masks_may_be_from_inference_mode(double):
    """They have no versions."""
    q, k, v = leaves()
    mask = wa.Padding(lengths_of_inference())
    outs = [wa.attention(q, k, v, mask=mask, backend=backend) for backend in (SIM, "reference")]
    found = [torch.autograd.grad(out.float().sum(), v)[0] for out in outs]
    torch.testing.assert_close(*found, rtol=1e-2, atol=1e-2)
    assert double.backwards == 1


def test_second_derivatives_are_refused(double):
    """Also by single tensors, for which torch runs no more of the graph than leads to them."""
    q, k, v = leaves()
    sinks, slopes = torch.zeros(4, requires_grad=True), torch.ones(4, requires_grad=True)
    out = wa.attention(q, k, v, score=wa.ALiBi(slopes), sinks=sinks, backend=SIM)
    dout = torch.ones_like(out, requires_grad=True)
    (dq,) = torch.autograd.grad(out, q, dout, create_graph=True)
    with pytest.raises(wa.AttentionError, match="are differentiated again"):
        dq.sum().backward(retain_graph=True)
    for by in (q, k, v, sinks, slopes, dout):
        with pytest.raises(wa.AttentionError, match="are differentiated again"):
            torch.autograd.grad(out.sum() + dq.sum(), by, retain_graph=True, allow_unused=True)


@pytest.mark.parametrize(("given", "switch", "expected"), [
    (None, False, False), (None, True, True), (True, False, True), (False, True, False)
])  # fmt: skip
def test_deterministic(given, switch, expected, double):
    q, k, v = leaves()
    out = wa.attention(q, k, v, backend=wa.Backend(SIM, deterministic=given))
    try:
        torch.use_deterministic_algorithms(switch)
        out.float().sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert double.checked.deterministic is expected


def test_deterministic_gradients_of_captured_tensors_are_added_in_order(double, monkeypatch):
    monkeypatch.setattr(captured, "_add_by_kernel", None)
    (q, k, v), slopes = leaves(), torch.ones(4, requires_grad=True)
    wa.attention(q, k, v, score=wa.ALiBi(slopes), backend=wa.Backend(SIM, deterministic=True)).float().sum().backward()
    assert slopes.grad is not None and slopes.grad.any()


def test_determinism_that_a_backward_lacks(double, monkeypatch):
    limits = LIMITS["sm90"]
    monkeypatch.setitem(LIMITS, "sm90", replace(limits, backward=BackwardLimits(("dense",), 128, deterministic=False)))
    q, k, v = leaves()
    with pytest.raises(wa.AttentionError, match=r"Backend\.deterministic is True; the backward of the sm90"):
        wa.attention(q, k, v, backend=wa.Backend(SIM, deterministic=True))
    out = wa.attention(q, k, v, backend=SIM)
    try:
        torch.use_deterministic_algorithms(True)
        with pytest.raises(wa.AttentionError, match=r"torch\.use_deterministic_algorithms is on; the backward"):
            wa.attention(q, k, v, backend=SIM)
        with pytest.raises(wa.AttentionError, match=r"torch\.use_deterministic_algorithms is on; the backward"):
            out.float().sum().backward(retain_graph=True)
        torch.use_deterministic_algorithms(True, warn_only=True)
        with pytest.warns(UserWarning, match=r"torch\.use_deterministic_algorithms is on; the backward"):
            out.float().sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_slope_goes_to_the_kernel(double):
    q, k, v = leaves()
    for score, expected in ((None, None), (wa.ALiBi(4), None), (wa.SoftCap(2.7), "sub"), ("twice", "const")):
        score = wa.CustomScore(lambda s, b, h, q, k: 2.0 * s) if score == "twice" else score
        wa.attention(q, k, v, score=score, backend=SIM).float().sum().backward()
        slope = double.checked.slope
        assert (None if slope is None else slope.outputs[0].op) == expected


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
def test_transforms_of_torch_func_are_refused(double):
    q, k, v = (x.detach() for x in leaves())
    for transform in (torch.func.grad, torch.func.vmap):
        with pytest.raises(wa.AttentionError, match=r"inside of a torch.func transform; .* torch.autograd's backward"):
            transform(lambda q: wa.attention(q, k, v, backend=SIM).float().sum())(q)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        with pytest.raises(wa.AttentionError, match="q carries a forward-mode tangent"):
            wa.attention(dual, k, v, backend=SIM)


def test_the_reference_serves_torch_func():
    q, k, v = (x.detach().float() for x in leaves())
    found = torch.func.grad(lambda q: wa.attention(q, k, v, mask=wa.Causal()).square().sum())(q)
    leaf = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(wa.attention(leaf, k, v, mask=wa.Causal()).square().sum(), leaf)
    torch.testing.assert_close(found, expected)


REFUSED = {
    "dim": ({"backend": SIM}, {"dim": 192}, r"takes head dims up to \d+, and these are 192 and 24"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_kernel_differentiates(name, double):
    call, case, message = REFUSED[name]
    with pytest.raises(wa.AttentionError, match=message):
        wa.attention(*leaves(**case), **call)
    with torch.no_grad():
        wa.attention(*leaves(**case), **call)


def test_bad_deterministic():
    with pytest.raises(wa.AttentionError, match="deterministic is 1; it must be None, True or False"):
        wa.Backend("auto", deterministic=1)
    with pytest.raises(wa.AttentionError, match="backend is 'gpu'"):
        wa.attention(*leaves(), backend=wa.Backend("gpu"))
