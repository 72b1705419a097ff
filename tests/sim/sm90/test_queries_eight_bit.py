"""Queries of 8 bits that become 16-bit operands, in the simulator: over pages, in decode, and where products of 8 bits
do not take the format or the scales."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from tests.drawn import drawn
from tests.sim.knocking import ALONE, SM90_PREFILL, WIDENED, knocked_out, reviewed
from tests.sim.sm90.decode import built
from tests.sim.sm90.lengths import kernel
from tests.sim.sm90.prefill import error
from tests.sim.sm90.ragged.test_lengths_code import FIRST
from warpattn.kernels.sm90.prefill.eight_bit.config import multiplies_bytes
from warpattn.kernels.sm90.select import list_launches
from warpattn.problem import Call, validate
from warpattn.problem.launch import DEFAULT_OPTIONS
from warpattn.problem.operands import Operands
from warpattn.runtime.simulate import dependent
from warpattn.sim.memory.findings import Finding

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LENGTHS = (90, 60)


@dataclass(frozen=True, eq=False)
class Case:
    tokens: int = 20
    kind: str = "paged"
    per: tuple[str | int | None, ...] = ("head", "head", "head")  # of q, k, v
    heads: int = 4
    dim: int = 64
    stored: torch.dtype = E4M3
    dtype: torch.dtype = torch.bfloat16
    page: int = 16
    mask: wa.Mask | None = wa.Causal()  # noqa: RUF009  frozen


CASES = {
    "decode": Case(1, dim=128),
    "decode-tokens": Case(3, per=("token", "token", "token"), heads=6),
    "decode-dense": Case(2, "dense", ("tensor", None, "head"), stored=E5M2, dtype=torch.float16),
    "prefill": Case(20, dim=128),
    "prefill-tokens": Case(70, per=("token", "token", "token")),
    "prefill-fp16": Case(30, per=("tensor", "head", None), stored=E5M2, dtype=torch.float16, page=64),
    "two-parts": Case(20, per=("token", "head", "head"), dim=192, dtype=torch.float16),
    "dense-e5m2": Case(40, "dense", stored=E5M2, mask=None),
    "dense-tokens": Case(40, "dense", ("token", "head", "tensor"), mask=wa.SlidingWindow(30)),
    "dense-rows": Case(70, "dense", ("64 rows", "64 rows", "token"), mask=wa.SlidingWindow(30)),
    "dense-rows-e5m2": Case(140, "dense", ("128 rows", "64 rows", "head"), stored=E5M2, dim=128),
    "decode-rows": Case(3, "dense", ("64 rows", "64 rows", "token"), heads=6),
    "ragged-tokens": Case(40, "ragged", ("token", "token", "head")),
    "step": Case(40, "step", ("head", "head", "head")),
    "step-tokens": Case(40, "step", ("token", "token", "token"), dim=128),
}


def made(case: Case) -> tuple[wa.Quantized, Any, Any]:
    """Queries, and the other operands of a call: the pages, or keys, values and perhaps offsets. Heads and tokens have
    different sizes."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        x = torch.randn(*shape, generator=generator) * torch.linspace(0.5, 2.0, shape[-2])[:, None]
        return x * torch.linspace(0.5, 1.5, shape[-3])[:, None, None]

    q_per, k_per, v_per = (per or "tensor" for per in case.per)
    if case.kind in ("dense", "ragged"):
        q, k, v = (normal(2, n, heads, case.dim) for n, heads in ((case.tokens, case.heads), (90, 2), (90, 2)))
        if case.kind == "ragged":
            q, k, v = q.flatten(0, 1)[: case.tokens], k.flatten(0, 1)[:90], v.flatten(0, 1)[:90]
        x = [wa.quantize(x, case.stored, per=per) for x, per in ((q, q_per), (k, k_per), (v, v_per))]
        seq = wa.Ragged(torch.tensor([0, 11, case.tokens]).int(), torch.tensor([0, 37, 90]).int())
        return x[0], x[1], (x[2], *([seq] if case.kind == "ragged" else []))
    pages = -(-96 // case.page)
    k, v = (wa.quantize(normal(2 * pages, case.page, 2, case.dim), case.stored, per=per) for per in (k_per, v_per))
    table = torch.arange(2 * pages).view(2, pages).flip(1).int()
    kv = wa.PagedKV(k.values, v.values, table, torch.tensor(LENGTHS).int(), k_scale=k.scale, v_scale=v.scale)
    shape = (case.tokens,) if case.kind == "step" else (2, case.tokens)
    q = wa.quantize(normal(*shape, case.heads, case.dim), case.stored, per=q_per)
    return q, kv, () if case.kind == "paged" else (wa.Ragged(torch.tensor([0, 1, case.tokens]).int()),)


def attended(case: Case, backend: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """out in `dtype` and LSE."""
    q, first, others = made(case)
    tail: dict[str, Any] = {"mask": case.mask, "return_lse": True, "backend": backend}
    tail["out"] = torch.empty(q.values.shape, dtype=dtype)
    call = {"dense": wa.attention, "ragged": wa.attention_varlen}.get(case.kind, wa.attention_paged)
    return call(q, first, *others, **tail)


DRAWN = ("decode-tokens",)


@pytest.mark.parametrize("name", drawn(CASES, DRAWN))
def test_right_and_without_findings(name):
    """As exact as queries of 16 bits: nothing is rounded to 8 bits on the way."""
    case = CASES[name]
    out, lse = attended(case, "simulate:sm90", case.dtype)
    expected, expected_lse = attended(case, "reference", torch.float32)
    limit = 1e-2 if case.dtype == torch.bfloat16 else 2e-3
    assert error(out.float(), expected) < limit * max(1.0, expected.abs().max().item())
    assert error(lse, expected_lse) < 1e-3


@pytest.mark.parametrize(
    ("given", "fits"),
    [({}, True), ({"kind": "ragged"}, True), ({"per": ("token", "head", "head")}, False), ({"kind": "paged"}, False),
     ({"per": ("64 rows", "128 rows", "head")}, True), ({"per": ("head", "head", "token")}, False),
     ({"stored": E5M2}, False)],
)  # fmt: skip
def test_which_are_multiplied_as_they_are(given, fits):
    q, first, others = made(Case(**({"kind": "dense"} | given)))
    scales = {"q_scale": q.scale}
    if isinstance(first, wa.PagedKV):
        sequence, k, v = wa.PagedKV(**vars(first) | scales), first.k_pages, first.v_pages
    else:
        k, v = first.values, others[0].values
        scales |= {"k_scale": first.scale, "v_scale": others[0].scale}
        sequence = wa.Ragged(others[1].cu_q, others[1].cu_k, **scales) if len(others) > 1 else None
    if sequence is None:
        from warpattn.sequences import Dense

        sequence = Dense(**scales)
    assert multiplies_bytes(validate(Call(q.values, k, v, sequence)).problem) == fits


@pytest.mark.full
def test_shared_pages_change_nothing():
    """Their scales belong to the queries as they are, which the promise would regroup."""
    q, kv, _ = made(Case(2, per=("token", "head", "head")))
    shared = replace(kv, block_table=torch.tensor([[3, 1, 5, 6, 7, 8], [3, 2, 4, 9, 10, 11]]).int(), shared_pages=1)
    alone = replace(shared, shared_pages=0)
    found = [wa.attention_paged(q, pages, mask=wa.Causal(), backend="simulate:sm90") for pages in (shared, alone)]
    assert torch.equal(*found)


def test_scales_of_query_tokens_of_any_size():
    """In a tile some are 2^40 of others: fp16 holds what is left of the small ones, whose softmax is flat."""
    q, k, (v,) = made(Case(40, "dense", ("token", "head", "head")))
    power = torch.randint(-40, 10, q.scale.shape, generator=torch.Generator().manual_seed(0)).float().exp2()
    q = wa.Quantized(q.values, q.scale * power)
    found = wa.attention(q, k, v, scale=0.01, backend="simulate:sm90").float()
    expected = wa.attention(q, k, v, scale=0.01, out=torch.empty(q.values.shape))
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


LIST = ("st.shared.b32", "poke(ctx.rings.left.index(wg), -1)", "there is no such warpgroup")


@pytest.mark.full
@pytest.mark.parametrize("per", ["head", "token"])
def test_it_needs_its_synchronisation(per):
    """Queries are read whole before the first one is written, and seen by the tensor core. With NaN in
    the last values of a sequence both warpgroups compute tiles again."""
    torch.manual_seed(0)
    x = wa.quantize(torch.randn(2, 784, 1, 128), per=per)
    q = wa.quantize(torch.randn(2, 784, 1, 128), per=per)
    special = x.values.clone()
    special[1, 350:400] = float("nan")
    finite, special = (values.view(98, 16, 1, 128) for values in (x.values, special))
    scale = x.scale.view(98, 16, 1) if per == "token" else x.scale
    table, lengths = torch.arange(98).int().view(2, 49), torch.tensor([784, 400]).int()
    kv = wa.PagedKV(finite, finite.clone(), table, lengths, k_scale=scale, v_scale=scale.clone(), q_scale=q.scale)
    call = Call(q.values, kv.k_pages, kv.v_pages, kv, wa.Causal(), backend="simulate:sm90")
    out = torch.full((2, 784, 1, 128), float("nan"), dtype=torch.bfloat16)
    first, step = list_launches(
        validate(call), Operands(q.values, kv.k_pages, kv.v_pages, out, None, None), kv, DEFAULT_OPTIONS
    )

    def expected(values):
        tail = {"mask": wa.Causal(), "out": torch.empty(out.shape), "backend": "reference"}
        return wa.attention_paged(q, replace(kv, v_pages=values, q_scale=None), **tail)

    def once(module, schedule):
        for values, right in rights:
            kv.v_pages.copy_(values)
            wa.sim.simulate(kernel(first), first.grid, first.args)  # a change may leave the tile counter anywhere
            out.fill_(0.0)
            options = {"step_limit": 20_000, "first_finding": True}
            report = wa.sim.simulate(module, dependent(step, (1,)), step.args, schedule, **options)
            if report.clean and not torch.allclose(out.float(), right, atol=2e-2, rtol=2e-2, equal_nan=True):
                report.findings.append(Finding("AssertionFailed", "wrong output"))
            if not report.clean:
                break
        return report

    rights = [(values, expected(values)) for values in (finite, special)]
    results = knocked_out(built(step), once, reviewed([*SM90_PREFILL, FIRST, ALONE, WIDENED, LIST]))
    assert [found.noticed for found in results if found.op == LIST[0]] == [True, True, False, False]
    assert sum(found.noticed for found in results) > 0.8 * len(results)
