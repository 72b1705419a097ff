"""Gradients on the card through autograd: masks, scores and what they captured, ragged, compiled, recomputed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import warpattn as wa
from tests import cases
from tests.cases import MASKS, SCORES, Case
from tests.gradients import check_gradients, weights
from tests.unit.api.test_gradients import attend, require, taken

pytestmark = pytest.mark.gpu

BASE = Case(batch=2, seq_q=200, seq_k=333, heads_q=4, heads_kv=2, dim=128, dtype=torch.bfloat16, mask="causal")


def compare(case: Case) -> None:
    inputs = require(case.build("cuda"))
    dout, dlse = weights(inputs)
    check_gradients(inputs, taken(inputs, attend(inputs, "sm90"), dout, dlse), dout, dlse)


@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask):
    compare(replace(BASE, mask=mask))


@pytest.mark.parametrize("score", SCORES)
def test_scores_and_what_they_captured(score):
    compare(replace(BASE, score=score, sinks=True))


MORE = [replace(case, mask="causal", score="softcap", dim=64, dtype=torch.float16) for case in cases.ragged(BASE)]
MORE += [*cases.every_layout(BASE), *cases.every_head_count(replace(BASE, dim=96))]
MORE += [*cases.every_length(replace(BASE, dim=64), 128)]


@pytest.mark.parametrize("case", MORE, ids=lambda case: case.name)
def test_more(case):
    compare(case)


def leaves() -> list[torch.Tensor]:
    inputs = require(replace(BASE, seq_q=333).build("cuda"))
    return [inputs.q, inputs.k, inputs.v]


def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return wa.attention(q, k, v, mask=wa.Causal()) * 2


@pytest.mark.parametrize("how", ["compiled", "recomputed"])
def test_compiled_and_recomputed(how):
    tensors = leaves()
    expected = torch.autograd.grad(step(*tensors).float().square().sum(), tensors)
    if how == "compiled":
        out = torch.compile(step, fullgraph=True, backend="aot_eager")(*tensors)
    else:
        out = checkpoint(step, *tensors, use_reentrant=False)
    found = torch.autograd.grad(out.float().square().sum(), tensors)
    for mine, theirs, exact in zip(found, expected, (False, True, True), strict=True):  # only dq is added in any order
        torch.testing.assert_close(mine, theirs, rtol=0 if exact else 2e-2, atol=0 if exact else 2e-2)


def test_a_graph_of_a_whole_step():
    """Forward, backward and an update, captured once and replayed on other inputs."""
    inputs = replace(BASE, seq_q=333).build("cuda")
    k, v = inputs.k, inputs.v
    weight = torch.eye(128, device="cuda", dtype=torch.float32).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    q = inputs.q.clone()

    def run() -> None:
        optimizer.zero_grad(set_to_none=False)
        step((q.float() @ weight).to(q.dtype), k, v).float().square().mean().backward()
        optimizer.step()

    run()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    begin = weight.detach().clone()
    for scale in (1.0, -0.5):
        q.copy_(inputs.q * scale)
        with torch.no_grad():
            weight.copy_(begin)
        graph.replay()
        replayed = weight.detach().clone()
        with torch.no_grad():
            weight.copy_(begin)
        run()
        assert not torch.equal(replayed, begin)
        torch.testing.assert_close(replayed - begin, weight.detach() - begin, rtol=2e-2, atol=1e-7)


def test_what_has_no_gradient_is_one_error():
    inputs = replace(BASE, kind="paged", seq_q=4, lens_k=(70, 5), page_size=16).build("cuda")
    assert isinstance(inputs.sequence, wa.PagedKV)
    wa.attention_paged(inputs.q, inputs.sequence)
    with pytest.raises(wa.AttentionError, match=r'q requires a gradient.*backend="reference"'):
        wa.attention_paged(inputs.q.requires_grad_(), inputs.sequence)
