"""Calls that torch records, or makes of tensors without values: graphs of `make_fx` repeat them on other tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import warpattn as wa
from tests.unit.runtime.card import make_card, normal, written  # noqa: F401 (a fixture)
from warpattn.api import attention_backward

PAGES = torch.randn(9, 16, 2, 64), torch.randn(9, 16, 2, 64)
TABLE, LENGTHS = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32), torch.tensor([20, 30], dtype=torch.int32)
CU = torch.tensor([0, 4, 6], dtype=torch.int32)
Q, NEW = torch.randn(2, 3, 8, 64), torch.randn(2, 1, 2, 64)


def append(k: Tensor, v: Tensor, new: Tensor) -> Tensor:
    wa.append_paged(k, v, TABLE.clone(), LENGTHS.clone(), new, new)
    return k + v


def append_to_slots(k: Tensor, v: Tensor, new: Tensor) -> Tensor:
    wa.append_slots(new[:, 0], new[:, 0], k, v, torch.tensor([5, -1]))
    return k + v


def attend_to_pages(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor) -> Any:
    return wa.attention_paged(q, wa.PagedKV(k, v, table, lengths), mask=wa.Causal())


def merge(out: Tensor, lse: Tensor) -> Any:
    return wa.merge_states(out, lse, out * 2, lse + 1)


CALLS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "dense": (lambda q, k, v: wa.attention(q, k, v, mask=wa.Causal(), return_lse=True), (Q, NEW, NEW)),
    "out": (lambda q, out: wa.attention(q, q[:, :, :2], q[:, :, :2], out=out), (Q, torch.empty_like(Q))),
    "ragged": (lambda q, cu: wa.attention_varlen(q, q[:, :2], q[:, :2], wa.Ragged(cu)), (torch.randn(6, 8, 64), CU)),
    "paged": (attend_to_pages, (Q, *PAGES, TABLE, LENGTHS)),
    "append": (append, (*PAGES, NEW)),
    "slots": (append_to_slots, (*PAGES, NEW)),
    "merge": (merge, (Q, torch.randn(2, 8, 3))),
    "quantize": (lambda q: wa.quantize(q).values.float(), (Q,)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_graph_repeats_a_call_on_other_tensors(name: str) -> None:
    call, tensors = CALLS[name]
    graph = make_fx(call)(*[x.clone() for x in tensors])
    others = [x * 1.5 if x.is_floating_point() else x for x in tensors]
    expected = call(*[x.clone() for x in others])
    torch.testing.assert_close(graph(*others), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", CALLS)
def test_tensors_without_values(name: str) -> None:
    call, tensors = CALLS[name]
    expected = call(*[x.clone() for x in tensors])
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        found = call(*[fake.from_tensor(x) for x in tensors])
    for mine, truth in zip(*[x if isinstance(x, tuple) else (x,) for x in (found, expected)], strict=True):
        assert mine.shape == truth.shape and mine.dtype == truth.dtype


@pytest.mark.full
def test_a_saved_program_runs_in_another_process(tmp_path: Path) -> None:
    """That has registered the operator, which importing the package does not."""

    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return wa.attention(q, k, v, mask=wa.Causal())

    torch.export.save(torch.export.export(Model(), (Q, NEW, NEW)), tmp_path / "model.pt2")
    torch.save((Q, NEW, NEW, Model()(Q, NEW, NEW)), tmp_path / "tensors.pt")
    code = """import torch, warpattn.runtime.torch_op.operators
*tensors, expected = torch.load("tensors.pt")
torch.testing.assert_close(torch.export.load("model.pt2").module()(*tensors), expected, rtol=0, atol=0)"""
    path = {**os.environ, "PYTHONPATH": str(Path(wa.__file__).parents[1])}
    call = [sys.executable, "-c", code]
    done = subprocess.run(call, cwd=tmp_path, env=path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_gradients_without_values() -> None:
    with FakeTensorMode() as fake:
        q, k, v = (fake.from_tensor(x).requires_grad_() for x in (Q, NEW, NEW))
        found = torch.autograd.grad(wa.attention(q, k, v).sum(), (q, k, v))
    assert wa.attention(q, k, v).shape == Q.shape  # fake tensors bring their mode along
    assert [x.shape for x in found] == [Q.shape, NEW.shape, NEW.shape]


def test_a_repeated_call_on_a_card_is_recorded(card: Any) -> None:
    q, k, v = (normal() for _ in range(3))
    wa.attention(q, k, v)
    graph = make_fx(lambda q, k, v: wa.attention(q, k, v))(q, k, v)
    card.launches.clear()
    assert written(graph(q, k, v)) and len(card.launches) == 1


def test_a_merge_is_recorded_as_operations_of_torch() -> None:
    """A graph has no launch, so where kernels merge a call that says so is refused."""
    out, lse = Q.half(), torch.randn(2, 8, 3)
    graph = make_fx(merge)(out, lse)
    torch.testing.assert_close(graph(out, lse), tuple(merge(out, lse)))
    with pytest.raises(wa.AttentionError, match="torch records operations and would miss its launch"):
        make_fx(lambda out, lse: wa.merge_states(out, lse, backend="simulate:sm90"))(out, lse)


def test_a_plan_is_refused() -> None:
    with FakeTensorMode() as fake, pytest.raises(wa.AttentionError, match="a plan writes addresses"):
        wa.DecodePlan(fake.from_tensor(Q), wa.PagedKV(*map(fake.from_tensor, (*PAGES, TABLE, LENGTHS))))


def test_a_mode_that_only_looks_on_sees_the_reference() -> None:
    with FlopCounterMode(display=False) as counter:
        wa.attention(Q, Q[:, :, :2], Q[:, :, :2])
    assert counter.get_total_flops() == 2 * 2 * 2 * 8 * 3 * 3 * 64


def flops(call: Callable[..., Any], *given: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        call(*given)
    return counter.get_total_flops()


PAIRS = {"dense": (6, 6), "out": (18, 18), "ragged": (4 * 4 + 2 * 2, 6 * 6), "paged": (3 * 50, 6 * 32)}


@pytest.mark.parametrize("name", PAIRS)
def test_flops(name: str) -> None:
    call, tensors = CALLS[name]
    found = flops(make_fx(call)(*tensors), *tensors)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        most = flops(call, *map(fake.from_tensor, tensors))
    assert (found, most) == tuple(2 * 8 * pairs * (64 + 64) for pairs in PAIRS[name])


def test_flops_of_promised_lengths() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        q, cu = map(fake.from_tensor, (torch.randn(6, 2, 16), CU))
        for ragged, most in ((wa.Ragged(cu, max_q=5), 5), (wa.Ragged(cu, cu * 1, 5, 4), 4)):
            parts = wa.LatentQuery(q[..., :12], q[..., 12:])
            assert flops(wa.attention_varlen, parts, q, q[..., :8], ragged) == 24 * most * (16 + 8)


def test_flops_of_gradients() -> None:
    def train(q: Tensor, k: Tensor, v: Tensor) -> Any:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(wa.attention(*leaves, mask=wa.Causal()).sum(), leaves)

    graph = make_fx(train)(Q, NEW, NEW)
    assert flops(graph, Q, NEW, NEW) == 3.5 * 2 * 8 * 6 * (64 + 64)


def test_flops_of_a_call_on_a_card(card: Any) -> None:
    """The second is a repeated one; the last counter was made before the operators."""
    q = normal()
    once = 4 * q.shape[1] * q.numel()
    assert flops(lambda: [wa.attention(q, q, q) for _ in range(2)]) == 2 * once
    counter = FlopCounterMode(display=False)
    counter.flop_registry = {}
    with counter:
        wa.attention(q, q, q)
    assert counter.get_total_flops() == once and len(card.launches) == 3


def test_pages_that_all_share_are_recorded() -> None:
    q, k, v = (x.half() for x in (Q, *PAGES))
    kv = wa.PagedKV(k, v, TABLE[:1].expand(2, -1), LENGTHS, shared_pages=1)
    graph = make_fx(lambda q: wa.attention_paged(q, kv, backend="simulate:sm90"))(q)
    assert "warpattn.attention" in str(graph.code) and flops(graph, q) == 2 * 8 * 150 * (64 + 64)


@pytest.mark.parametrize("ragged", [False, True])
def test_a_backward_from_results_is_an_operator(ragged: bool) -> None:
    seq = wa.Ragged(torch.tensor([0, 15, 40], dtype=torch.int32), max_q=25) if ragged else None

    def backward(*tensors: Tensor) -> Any:
        return attention_backward(*tensors, seq=seq, mask=wa.Causal(), backend="simulate:sm90")

    shape = (40,) if ragged else (1, 40)
    q, k, v = (torch.randn(*shape, heads, 64).bfloat16() for heads in (2, 1, 1))
    call = wa.attention if seq is None else lambda *qkv, **tail: wa.attention_varlen(*qkv, seq, **tail)
    out, lse = call(q, k, v, mask=wa.Causal(), return_lse=True)
    given = torch.randn_like(out), q, k, v, out, lse
    graph = make_fx(backward)(*given)
    others = given[0] * 2, *given[1:]
    for found, expected in zip(graph(*others), backward(*others), strict=True):
        assert torch.equal(found, expected)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert [x.shape for x in backward(*map(mode.from_tensor, given))] == [q.shape, k.shape, v.shape]
