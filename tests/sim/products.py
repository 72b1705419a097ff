"""Calls whose q, k and v have 8 bits, for every architecture that multiplies them: cases, operands, bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import warpattn as wa
from tests.oracle import poisoned
from tests.sim.sm90.prefill import error
from warpattn.problem import Call, CheckedCall, validate
from warpattn.problem.operands import Operands
from warpattn.sequences import Dense

COSINE, RELATIVE = 0.9997, 3.5e-2  # against the values times their scales


@dataclass(frozen=True, eq=False)
class Case:
    """A dense problem. `per`: what scales belong to; those of v to heads where q and k have them per block of rows."""

    queries: int
    keys: int
    heads: int = 4
    heads_kv: int = 2
    dim: int = 128
    dim_v: int = 0
    batch: int = 1
    per: str = "head"
    mask: wa.Mask | None = wa.Causal()  # noqa: RUF009  frozen
    score: wa.Score | None = None
    sinks: bool = False
    scale: float | None = None
    dtype: torch.dtype = torch.bfloat16


Given = tuple[wa.Quantized, wa.Quantized, wa.Quantized]


def operands(case: Case) -> Given:
    """q, k, v; heads other than the first have other scales, each its own."""
    torch.manual_seed(0)
    shapes = ((case.queries, case.heads, case.dim), (case.keys, case.heads_kv, case.dim),
              (case.keys, case.heads_kv, case.dim_v or case.dim))  # fmt: skip
    q, k, v = (torch.randn(case.batch, *shape) for shape in shapes)
    for x in (q, k, v):
        x *= 1 + torch.arange(x.shape[2])[:, None] / 2
    if "rows" in case.per:
        for x in (q, k):
            x *= 0.5 + torch.rand(case.batch, x.shape[1] // 32 + 1, 1, 1).repeat_interleave(32, 1)[:, : x.shape[1]]
    of_values = "head" if "rows" in case.per else case.per
    return wa.quantize(q, per=case.per), wa.quantize(k, per=case.per), wa.quantize(v, per=of_values)


def checked_call(case: Case, given: Given, backend: str) -> tuple[CheckedCall, Operands, Dense]:
    """The call, its operands with outputs of NaN, and its scales."""
    q, k, v = given
    sequence = Dense(k.scale, v.scale, q.scale, v_transposed=v.transposed)
    sinks = torch.randn(case.heads) if case.sinks else None
    out = poisoned((*q.values.shape[:-1], v.values.shape[-1]), case.dtype)
    modifiers = (case.mask, case.score, sinks, case.scale)
    checked = validate(Call(q.values, k.values, v.values, sequence, *modifiers, True, out, backend))
    lse = poisoned(checked.lse_shape, torch.float32)
    return checked, Operands(*(x.values for x in given), out, lse, sinks), sequence


def check(case: Case, given: Given, x: Operands) -> None:
    """The outputs in `x` are those of the reference in fp64, as near as weights of 8 bits can be."""
    exact = (values.dequantized().double() for values in given)
    tail: dict[str, Any] = {"mask": case.mask, "score": case.score, "sinks": x.sinks, "scale": case.scale}
    expected, lse = wa.attention(*exact, **tail, return_lse=True, backend="reference")
    near(x.out.double(), expected)
    assert x.lse is not None and error(x.lse, lse) < 1e-4


def near(out: Tensor, expected: Tensor) -> None:
    """Rows without keys are 0 in both."""
    assert torch.cosine_similarity(out.flatten(), expected.flatten(), 0) >= COSINE or not expected.any()
    assert (out - expected).norm() <= RELATIVE * expected.norm()
