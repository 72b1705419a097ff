"""Hopper prefill over 8-bit keys and values in the simulator: right values, no findings, needed synchronisation."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import warpattn as wa
from tests.drawn import drawn, in_turn
from tests.oracle import poisoned
from tests.sim.knocking import SM90_PREFILL, first_pass, knocked_out, reviewed
from tests.sim.sm90.decode import Decode, tensors
from tests.sim.sm90.decoding.test_decode import SCHEDULES
from tests.sim.sm90.lengths import kernel
from tests.sim.sm90.prefill import error
from tests.sim.sm90.ragged.test_lengths_code import FIRST
from tests.unit.kernels.backward.test_sm90_backward import innermost_loops, spills
from warpattn.kernels.sm90.prefill.config import SMEM_LIMIT
from warpattn.kernels.sm90.select import list_launches
from warpattn.machine_code.roles import role_faults
from warpattn.machine_code.sass import resources
from warpattn.problem import Call, validate
from warpattn.problem.launch import DEFAULT_OPTIONS
from warpattn.problem.operands import Operands
from warpattn.quantized import dequantized, granularity
from warpattn.reference import reference
from warpattn.runtime import compiler
from warpattn.runtime.simulate import Options, dependent, traced
from warpattn.sequences import Dense, PagedKV, Sequence
from warpattn.sim import knock_out

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MIXED = (129, 0, 30)
PAGED = Decode((150, 20), page=16, tokens=18, dim=128, heads=4, heads_kv=2, mask=wa.Causal(), stored=E4M3)
CASES = {
    "paged": PAGED,
    "fp16-e5m2": replace(PAGED, page=64, dtype=torch.float16, stored=E5M2, per=("tensor", None), sinks=True),
    "tokens": replace(PAGED, lengths=MIXED, per=("token", "token"), score=wa.SoftCap(3.0)),
    "key-tokens": replace(PAGED, page=8, dim=64, per=("token", "head"), mask=wa.SlidingWindow(40)),
    "head-dim-256": replace(PAGED, page=32, dim=256),
    "two-parts": replace(PAGED, dim=192, dim_v=80, page=48),
    "dense": replace(PAGED, lengths=(150, 150), page=0, tokens=140, per=("head", "tensor")),
    "columns": replace(PAGED, per=(64, 64)),
    "columns-of-keys": replace(PAGED, dim=192, dim_v=128, page=48, per=(64, "token"), score=wa.SoftCap(3.0)),
    "columns-of-keys-fp16": replace(PAGED, per=(64, "head"), dtype=torch.float16, stored=E5M2),
    "columns-of-values": replace(PAGED, lengths=(150, 150), page=0, tokens=140, per=("head", 64), stored=E5M2),
    "columns-256": replace(PAGED, lengths=MIXED, page=32, dim=256, per=(128, 64)),
    "rows": replace(PAGED, lengths=(150, 150), page=0, tokens=140, per=("64 rows", "token")),
    "rows-fp16": replace(PAGED, lengths=(300,), page=0, tokens=20, per=("128 rows", "head"), dtype=torch.float16),
    "dense-tokens": replace(PAGED, lengths=(150,), page=0, tokens=20, per=("token", "token"), mask=None),
}


@dataclass(frozen=True, eq=False)
class Inputs:
    """One call."""

    q: Tensor
    k: Tensor
    v: Tensor
    sequence: Sequence
    tail: dict[str, Any]

    def call(self) -> Call:
        return Call(self.q, self.k, self.v, self.sequence, *self.tail.values(), None, True, backend="reference")


def inputs(case: Decode) -> Inputs:
    """A case's tensors; pages of no sequence and rows after the last key are NaN."""
    q, (k, v), sequence, sinks = tensors(case)
    if isinstance(sequence, PagedKV):
        k, v = sequence.k_pages, sequence.v_pages
    return Inputs(q, k, v, sequence, {"mask": case.mask, "score": case.score, "sinks": sinks})


def check(x: Inputs, schedule: str = "lazy", seed: int = 0) -> None:
    checked = replace(validate(x.call(), read_values=False), backend="simulate:sm90")
    out = poisoned((*x.q.shape[:-1], checked.problem.dim_v), x.q.dtype)
    lse = poisoned(checked.lse_shape, torch.float32)
    report = traced(checked, Operands(x.q, x.k, x.v, out, lse, x.tail["sinks"]), Options(schedule, seed), x.sequence)
    assert report.clean, report
    expected, expected_lse = expected_of(x)
    limit = 2e-2 if x.q.dtype == torch.bfloat16 else 3e-3
    assert error(out.float(), expected) < limit * max(1.0, expected.abs().max().item())
    assert error(lse, expected_lse) < 1e-4


def multiplied(name: str, rows: Tensor, scale: Tensor) -> Tensor:
    """Values as the kernel multiplies them, in bf16; keys in fp16, times the largest scale of their blocks."""
    if name == "v":
        return dequantized(rows, scale).bfloat16()
    top = scale.amax(-1, keepdim=True)
    return dequantized(rows, scale / top).half().float() * top


def expected_of(x: Inputs) -> tuple[Tensor, Tensor]:
    """The reference's result, from keys and values with scales of blocks of columns as the kernel multiplies them."""
    rows, changes = {"k": x.k, "v": x.v}, {}
    for name, scale in (("k", x.sequence.k_scale), ("v", x.sequence.v_scale)):
        if isinstance(granularity(scale, rows[name].shape), int):
            rows[name] = multiplied(name, rows[name], scale)
            changes |= {f"{name}_scale": None} | ({f"{name}_pages": rows[name]} if x.sequence.kind == "paged" else {})
    sequence = replace(x.sequence, **changes) if changes else x.sequence
    return reference(x.q, rows["k"], rows["v"], sequence=sequence, **x.tail)


@pytest.mark.parametrize(
    ("name", "schedule", "seed"), in_turn(CASES, ["dense"], SCHEDULES, each=6)
)
def test_right_and_without_findings(name, schedule, seed):
    check(inputs(CASES[name]), schedule, seed)


@pytest.mark.full
@pytest.mark.parametrize("per", drawn(["head", "token"], ["token"]))
def test_ragged_sequences(per):
    """Two sequences end to end, and the queries of a step over pages."""
    torch.manual_seed(0)
    cu = torch.tensor([0, 40, 60]).int()
    q, x = torch.randn(60, 4, 64).bfloat16(), torch.randn(60, 2, 64)
    k, v = wa.quantize(x, per=per), wa.quantize(x.flip(0), per=per)
    tail = {"mask": wa.Causal(), "score": None, "sinks": None}
    check(Inputs(q, k.values, v.values, wa.Ragged(cu, k_scale=k.scale, v_scale=v.scale), tail))
    if per == "head":
        step = inputs(PAGED)
        found = [
            wa.attention_paged(step.q[0].repeat(2, 1, 1), step.sequence, wa.Ragged(torch.tensor([0, 33, 36]).int()),
                               mask=wa.Causal(), backend=backend)
            for backend in ("simulate:sm90", "reference")
        ]  # fmt: skip
        torch.testing.assert_close(found[0], found[1], atol=2e-2, rtol=2e-2)


@pytest.mark.full
def test_keys_are_shared_out_and_heads_packed():
    """A few queries over many dense keys: the plan splits them, as it does in 16 bits."""
    torch.manual_seed(0)
    k, v = (wa.quantize(torch.randn(1, 2200, 1, 64)) for _ in range(2))
    q = torch.randn(1, 20, 4, 64).bfloat16()
    check(Inputs(q, k.values, v.values, Dense(k.scale, v.scale), {"mask": wa.Causal(), "score": None, "sinks": None}))


def test_a_softmax_scale_below_0():
    """The scale of keys joins it: dense, as the public call hands it on."""
    torch.manual_seed(0)
    k, v = (wa.quantize(torch.randn(1, 40, 2, 64), per="head") for _ in range(2))
    q = torch.randn(1, 20, 2, 64).half()
    out = wa.attention(q, k, v, scale=-0.2, backend="simulate:sm90")
    assert error(out.float(), wa.attention(q.float(), k, v, scale=-0.2, backend="reference")) < 3e-3


@pytest.mark.full
def test_scales_whose_product_is_tiny():
    """Scores of 0 where hidden ones are minus infinity."""
    x = inputs(replace(PAGED, per=("head", "head")))
    check(replace(x, sequence=replace(x.sequence, k_scale=torch.full((2,), 1e-38))))


@pytest.mark.full
@pytest.mark.parametrize("magnitude", [1e-30, 1e30])
def test_queries_that_fp16_does_not_hold(magnitude):
    """bf16 queries become fp16 fractions: of a tile one row is infinite, one NaN, one 2^-20 of the others."""
    x = inputs(CASES["dense"])
    q = x.q * magnitude
    q[:, 3] *= 2.0**-20
    scaled = replace(x, q=q, sequence=replace(x.sequence, k_scale=x.sequence.k_scale / magnitude))
    check(scaled)
    q[0, 70, 0, 5], q[0, 71, 1, 7] = float("inf"), float("nan")
    found = [
        wa.attention(q, wa.Quantized(x.k, scaled.sequence.k_scale), wa.Quantized(x.v, x.sequence.v_scale),
                     mask=wa.Causal(), backend=backend) for backend in ("simulate:sm90", "reference")
    ]  # fmt: skip
    torch.testing.assert_close(found[0], found[1], atol=2e-2, rtol=2e-2, equal_nan=True)


@pytest.mark.full
@pytest.mark.parametrize("name", ["paged", "columns"])
def test_machine_code(name):
    """Nothing is spilled beside the products of key tiles, stack as measured with Triton 3.9.0 (the second pass has it,
    and the conversion by scales of columns); nothing that roles could wait for in vain."""
    x = inputs(CASES[name])
    checked = replace(validate(x.call(), read_values=False), backend="simulate:sm90")
    out, lse = poisoned((*x.q.shape[:-1], x.v.shape[-1]), x.q.dtype), poisoned(checked.lse_shape, torch.float32)
    _, step = list_launches(checked, Operands(x.q, x.k, x.v, out, lse, None), x.sequence, DEFAULT_OPTIONS)
    made = compiler.compiled(step)
    cubin = made.asm["cubin"]
    loops = innermost_loops(cubin, lambda body: body.count("HGMMA") == 16)
    assert len(loops) == 2 and not any(map(spills, loops))
    assert resources(cubin).stack <= {"paged": 120, "columns": 168}[name] and role_faults(made.asm) == []
    assert made.metadata.shared <= SMEM_LIMIT


@pytest.mark.full
@pytest.mark.parametrize("name", ["paged", "columns"])
def test_it_needs_its_synchronisation(name):
    x = inputs(replace(CASES[name], lengths=(780, 400), tokens=780, heads=1, heads_kv=1))
    checked = replace(validate(x.call(), read_values=False), backend="simulate:sm90")
    out, lse = poisoned((*x.q.shape[:-1], x.v.shape[-1]), x.q.dtype), poisoned(checked.lse_shape, torch.float32)
    first, step = list_launches(checked, Operands(x.q, x.k, x.v, out, lse, None), x.sequence, DEFAULT_OPTIONS)

    def once(module, schedule):
        wa.sim.simulate(kernel(first), first.grid, first.args)  # a changed kernel may leave the tile counter anywhere
        grid = dependent(step, (1,))
        return wa.sim.simulate(module, grid, step.args, schedule=schedule, step_limit=20_000, first_finding=True)

    def change(module, run):
        return knock_out(module, run, only=first_pass)

    results = knocked_out(kernel(step), once, reviewed([*SM90_PREFILL, FIRST]), change=change)
    assert sum(found.noticed for found in results) > 0.8 * len(results)
