"""Plans for cards with fewer SMs than an H200: other grids and parts, the same values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import warpattn as wa
from bench.choices import checked, empty, shapes
from tests.drawn import drawn
from warpattn.kernels.sm90.select import choose
from warpattn.problem import Call, validate
from warpattn.problem.arch import ARCHS, Arch
from warpattn.problem.operands import Operands
from warpattn.runtime import launches
from warpattn.sequences import Dense

PROCESSORS = [1, 7, 14, 16, 60, 78, 114, 144]  # among them parts of a card, an H20 and an H100 with PCIe


def card_of(number: int) -> Arch:
    """A Hopper card with so many SMs."""
    return replace(ARCHS["sm90"], processors=number)


def dense(queries: int, keys: int, heads: tuple[int, int], dim: int, mask: wa.Mask | None = None) -> torch.Tensor:
    """The largest difference from the reference."""
    torch.manual_seed(0)
    q = torch.randn(1, queries, heads[0], dim).bfloat16()
    k, v = (torch.randn(1, keys, heads[1], dim).bfloat16() for _ in range(2))
    out, want = (wa.attention(q, k, v, mask=mask, backend=name) for name in ("simulate:sm90", "reference"))
    return (out.float() - want.float()).abs().max()


@pytest.mark.parametrize("number", drawn(PROCESSORS, [7, 78]))
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "dim", "mask"),
    [
        (1, 1000, (8, 2), 64, None),
        (40, 2100, (2, 1), 128, wa.Causal()),
        (200, 333, (4, 2), 64, wa.Causal()),
    ],
    ids=["decode", "split", "prefill"],
)
def test_values(monkeypatch, number: int, queries: int, keys: int, heads, dim: int, mask) -> None:
    monkeypatch.setitem(ARCHS, "sm90", card_of(number))
    assert dense(queries, keys, heads, dim, mask) < 0.01


@pytest.mark.parametrize("number", drawn(PROCESSORS, [7, 78]))
def test_values_of_pages(monkeypatch, number: int) -> None:
    monkeypatch.setitem(ARCHS, "sm90", card_of(number))
    torch.manual_seed(0)
    k, v = (torch.randn(12, 64, 2, 64).bfloat16() for _ in range(2))
    table, lengths = torch.randperm(12).int().view(2, 6), torch.tensor([300, 17], dtype=torch.int32)
    q, kv = torch.randn(2, 1, 8, 64).bfloat16(), wa.PagedKV(k, v, table, lengths)
    out, want = (wa.attention_paged(q, kv, backend=name) for name in ("simulate:sm90", "reference"))
    assert (out.float() - want.float()).abs().max() < 0.01


def decoding(batch: int) -> Call:
    """One new token a sequence, of tensors that take no memory."""
    q = torch.empty(1, dtype=torch.bfloat16).expand(batch, 1, 32, 128)
    k = torch.empty(1, dtype=torch.bfloat16).expand(batch, 4096, 8, 128)
    return Call(q, k, k, Dense(), backend="reference")


@pytest.mark.parametrize("number", PROCESSORS)
def test_no_plan_has_more_programs_than_fit(number: int) -> None:
    target = card_of(number)
    problems = [checked(case, empty(case)).problem for case in shapes(30, 5)]
    problems += [validate(decoding(batch)).problem for batch in (1, 3, 64)]
    choices = [choose(problem, target) for problem in problems]
    assert {choice.kernel for choice in choices} == {"prefill", "decode"}
    assert all(1 <= choice.grid[0] <= number * choice.config.ctas for choice in choices)


def test_a_call_is_planned_for_its_card(monkeypatch) -> None:
    def programs(backend: str) -> int:
        call = decoding(8)
        made, x = replace(validate(call), backend=backend), Operands(call.q, call.k, call.v, call.q, None, None)
        return launches.list_launches(made, x, Dense())[0].grid[0]

    usual = programs("sm90")
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(launches, "card_target", lambda device, arch: card_of(78))
    assert usual > 78 >= programs("sm90") and programs("simulate:sm90") == usual
