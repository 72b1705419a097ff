"""Hopper prefill over 16-bit copies of 8-bit keys and values in the simulator."""

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from tests.drawn import drawn, in_turn
from tests.oracle import poisoned
from tests.sim.sm90.decode import Decode
from tests.sim.sm90.decoding.test_decode import SCHEDULES
from tests.sim.sm90.lengths import kernel
from tests.sim.sm90.prefill import error
from tests.sim.sm90.test_prefill_eight_bit import E4M3, E5M2, check, inputs
from warpattn.kernels.sm90.copies.config import of_token
from warpattn.kernels.sm90.select import list_launches
from warpattn.problem import Call, validate
from warpattn.problem.launch import DEFAULT_OPTIONS, PlanOptions
from warpattn.problem.operands import Operands
from warpattn.quantized import dequantized, granularity
from warpattn.reference import reference
from warpattn.runtime.simulate import Options, dependent, traced
from warpattn.sequences import PagedRagged

PAGED = Decode((150, 20), page=16, tokens=90, dim=64, heads=16, mask=wa.Causal(), stored=E4M3)
CASES = {
    "paged": PAGED,
    "fp16-e5m2": replace(PAGED, page=64, dtype=torch.float16, stored=E5M2, per=("tensor", None), sinks=True),
    "pages-of-8": replace(PAGED, lengths=(129, 0, 30), page=8, tokens=110, per=("head", None), score=wa.SoftCap(3.0)),
    "large-pages": replace(PAGED, lengths=(300, 257), page=256, per=(None, None), dim=128),
    "two-parts": replace(PAGED, dim=192, dim_v=80, page=48),
    "head-dim-256": replace(PAGED, page=32, dim=256),
    "dense": replace(PAGED, lengths=(150, 150), page=0, tokens=140, heads=18, heads_kv=2, mask=None),
    "dense-causal": replace(PAGED, lengths=(260,), page=0, tokens=140, per=("tensor", "head")),
}


def launches(x: Any, options: PlanOptions = DEFAULT_OPTIONS) -> Any:
    """Those of a call, and its operands."""
    checked = replace(validate(x.call(), read_values=False), backend="simulate:sm90")
    out, lse = x.q.new_empty(*x.q.shape[:-1], checked.problem.dim_v), torch.empty(checked.lse_shape)
    return list_launches(checked, Operands(x.q, x.k, x.v, out, lse, x.tail["sinks"]), x.sequence, options)


FACTORS = {
    "tokens": replace(PAGED, per=("token", "token")),
    "of-keys": replace(PAGED, page=32, dim=96, per=("token", "head"), stored=E5M2),
    "columns": replace(PAGED, dim=128, per=(64, 128)),
    "columns-256": replace(PAGED, dim=256, dim_v=192, per=(128, 64)),
    "dense-rows": replace(PAGED, lengths=(260,), page=0, tokens=140, per=("64 rows", "token")),
    "dense-columns": replace(PAGED, lengths=(260,), page=0, tokens=140, dim=192, dim_v=128, per=(64, 128)),
}
DRAWN = ["dense-causal", "pages-of-8"]


def run(x: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of a call, without findings."""
    checked = replace(validate(x.call(), read_values=False), backend="simulate:sm90")
    out = poisoned((*x.q.shape[:-1], checked.problem.dim_v), x.q.dtype)
    lse = poisoned(checked.lse_shape, torch.float32)
    report = traced(checked, Operands(x.q, x.k, x.v, out, lse, x.tail["sinks"]), Options("lazy", 0), x.sequence)
    assert report.clean, report
    return out, lse


@pytest.mark.parametrize(("name", "schedule", "seed"), in_turn(CASES, DRAWN, SCHEDULES, each=3))
def test_right_and_without_findings(name: str, schedule: str, seed: int) -> None:
    x = inputs(CASES[name])
    assert launches(x)[0].name == "sm90.copy"
    check(x, schedule, seed)


@pytest.mark.parametrize(
    "changes",
    [{"per": ("token", "head"), "dtype": torch.float16}, {"mask": wa.SlidingWindow(40)}, {"tokens": 40}],
    ids=["fp16-tokens", "window", "few-rows"],
)
def test_other_calls_convert_in_each_tile(changes: dict[str, Any]) -> None:
    """Factors of tokens that may exceed fp16, masks that hide old keys, few rows of queries."""
    assert launches(inputs(replace(PAGED, **changes)))[0].name == "sm90.order"


def test_batch_invariant_results_need_no_copies() -> None:
    assert launches(inputs(PAGED), PlanOptions(batch_invariant=True))[0].name == "sm90.order"


@pytest.mark.parametrize("name", drawn(FACTORS, ["tokens", "columns", "dense-rows"]))
def test_factors_of_tokens_are_in_the_copies(name: str) -> None:
    """Each element is rounded once, to bf16, as in a cache of 16 bits."""
    x = inputs(FACTORS[name])
    assert launches(x)[0].name == "sm90.copy"
    names = ("k_pages", "v_pages") if x.sequence.kind == "paged" else ("k", "v")
    fields, rounded = {}, {"k": x.k, "v": x.v}
    for operand, pages, scale in zip("kv", names, (x.sequence.k_scale, x.sequence.v_scale), strict=True):
        if of_token(granularity(scale, rounded[operand].shape)):
            rounded[operand] = dequantized(rounded[operand], scale).bfloat16()
            fields |= {f"{operand}_scale": None} | ({pages: rounded[operand]} if len(pages) > 1 else {})
    found, lse = run(x)
    exact = reference(x.q, x.k, x.v, sequence=x.sequence, **x.tail)
    expected = reference(x.q, rounded["k"], rounded["v"], sequence=replace(x.sequence, **fields), **x.tail)
    assert error(lse, expected[1]) < 1e-4 and error(lse, exact[1]) < 1e-2
    for out, _ in (exact, expected):
        assert error(found.float(), out) < 2e-2 * max(1.0, out.abs().max().item())


@pytest.mark.full
def test_ragged_sequences() -> None:
    """Two sequences end to end."""
    torch.manual_seed(0)
    q, x = torch.randn(260, 16, 64).bfloat16(), torch.randn(310, 1, 64)
    k, v = wa.quantize(x, per="head"), wa.quantize(x.flip(0), per="tensor")
    cu_q, cu_k = torch.tensor([0, 200, 260]).int(), torch.tensor([0, 210, 310]).int()
    out, expected = (
        wa.attention_varlen(q, k, v, wa.Ragged(cu_q, cu_k), mask=wa.Causal(), backend=backend)
        for backend in ("simulate:sm90", "reference")
    )
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


def test_keys_of_decoded_sequences_are_not_copied() -> None:
    """A step of a prompt of 300 tokens and a new one; page numbers past the ends are no pages."""
    x = inputs(replace(PAGED, lengths=(310, 20), tokens=301))
    sequence = x.sequence.with_fields(block_table=x.sequence.block_table.clone())
    sequence.block_table[1, 2:] = 10**9
    queries = wa.Ragged(torch.tensor([0, 300, 301]).int())
    q = x.q[0]
    step = PagedRagged(sequence, queries)
    call = Call(q, x.k, x.v, step, wa.Causal(), backend="reference")
    checked = replace(validate(call, read_values=False), backend="simulate:sm90")
    out = torch.empty_like(q)
    listing, copying, *rest = list_launches(checked, Operands(q, x.k, x.v, out, None, None), step, DEFAULT_OPTIONS)
    prefill = ["sm90.order", "sm90.prefill_varlen"]
    names = ["sm90.places", "sm90.copy_places", *prefill, *prefill, "sm90.decode"]
    assert [launch.name for launch in (listing, copying, *rest)] == names
    for copy in (copying.args["k_out"], copying.args["v_out"]):
        copy.fill_(torch.nan)
    for launch in (listing, copying, *rest):
        assert wa.sim.simulate(kernel(launch), dependent(launch, launch.grid), launch.args).clean
    k = copying.args["k_out"]
    assert not k[:2].isnan().any() and k[2, :54].isfinite().all() and k[2, 54:].isnan().all()
    assert len(k) == 6 and k[3:].isnan().all()
    expected = wa.attention_paged(q, sequence, queries, mask=wa.Causal(), backend="reference")
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES[:1] + SCHEDULES[3:4])
def test_pages_of_16_bits_are_copied_into_whole_tiles(schedule: str, seed: int) -> None:
    """For four times as many rows as 8 bits; large pages are read where they are."""
    plain = replace(PAGED, tokens=145, lengths=(150, 140), heads=64, stored=None, dtype=torch.float16)
    x = inputs(plain)
    assert launches(x)[0].name == "sm90.copy"
    check(x, schedule, seed)
    assert launches(inputs(replace(plain, page=128)))[0].name == "sm90.order"
    assert launches(inputs(replace(plain, tokens=80)))[0].name == "sm90.order"


@pytest.mark.parametrize("name", ["paged", "dense-causal"])
def test_hidden_values_reach_no_row(name: str) -> None:
    """NaN in a key and in a value: rows before them give what they would without, those after them NaN."""
    x = inputs(CASES[name])
    case, (k, v) = CASES[name], (x.k.clone(), x.v.clone())
    key = case.lengths[0] - 40
    outer, row = (0, key) if not case.page else (int(x.sequence.block_table[0, key // 16]), key % 16)
    nan = torch.tensor(torch.nan).to(E4M3)
    k[outer, row, 0, 3], v[outer, row, 0, 5] = nan, nan
    sequence = x.sequence.with_fields(k_pages=k, v_pages=v) if case.page else x.sequence
    found, expected = (attended(x.q, k, v, sequence, backend) for backend in ("simulate:sm90", "reference"))
    first = key - (case.lengths[0] - case.tokens)
    assert expected[0, :first].isfinite().all() and expected[0, first:].isnan().all()
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2, equal_nan=True)


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequence: Any, backend: str) -> torch.Tensor:
    """A causal call over pages or dense keys."""
    tail: dict[str, Any] = {"mask": wa.Causal(), "backend": backend}
    if sequence.kind == "paged":
        return wa.attention_paged(q, sequence, **tail)
    return wa.attention(q, wa.Quantized(k, sequence.k_scale), wa.Quantized(v, sequence.v_scale), **tail)
