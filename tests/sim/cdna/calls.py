"""Runs the attention kernels of gfx942 and gfx950 in the simulator, on calls of every sequence kind."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from warpattn.kernels.cdna.launch import launches_of_choice
from warpattn.kernels.cdna.select import choose, prefill_config
from warpattn.masks import Full, Mask
from warpattn.problem import Call, CheckedCall, validate
from warpattn.problem.arch import ARCHS as TARGETS
from warpattn.problem.launch import Choice
from warpattn.problem.operands import Operands, fitted
from warpattn.quantized import Quantized, quantize
from warpattn.reference import reference
from warpattn.runtime.simulate import Options, run_launch
from warpattn.scores import Score
from warpattn.sequences import Dense, PagedKV, Ragged, Sequence
from warpattn.sim import Report

ARCHS = ("gfx942", "gfx950")
SCHEDULES = ("eager", "lazy", "adversarial", "random")
NAN = float("nan")
E4M3 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}
E5M2 = {"gfx942": torch.float8_e5m2fnuz, "gfx950": torch.float8_e5m2}
TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3}  # of outputs around 1


@dataclass(frozen=True)
class Case:
    """A small problem."""

    seq_q: int
    seq_k: int
    heads: int = 2
    heads_kv: int = 1
    dim: int = 64
    dim_v: int = 0
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16
    mask: Mask = Full()  # noqa: RUF009  frozen
    score: Score | None = None
    sinks: bool = False
    scale: float | None = None

    def call(self) -> Call:
        """The dense problem with random operands."""
        q = torch.randn(self.batch, self.seq_q, self.heads, self.dim).to(self.dtype)
        k = torch.randn(self.batch, self.seq_k, self.heads_kv, self.dim).to(self.dtype)
        v = torch.randn(self.batch, self.seq_k, self.heads_kv, self.dim_v or self.dim).to(self.dtype)
        return self.on(q, k, v, Dense())

    def on(self, q: Tensor, k: Tensor, v: Tensor, sequence: Sequence) -> Call:
        """The call with operands of any sequence kind."""
        sinks = torch.randn(self.heads) if self.sinks else None
        return Call(q, k, v, sequence, self.mask, self.score, sinks, self.scale, True)


def ragged(case: Case, lens_q: list[int], lens_k: list[int] | None = None, max_q: int | None = None) -> Call:
    """Sequences of these lengths laid end to end."""
    keys = lens_q if lens_k is None else lens_k
    q = torch.randn(sum(lens_q), case.heads, case.dim).to(case.dtype)
    k, v = (torch.randn(sum(keys), case.heads_kv, case.dim).to(case.dtype) for _ in "kv")
    cu_k = None if lens_k is None else _offsets(lens_k)
    return case.on(q, k, v, Ragged(_offsets(lens_q), cu_k, max_q))


def paged(case: Case, lengths: list[int], page_size: int) -> Call:
    """Sequences in shuffled pages; unused pages, tails of pages and unused table entries are garbage."""
    per_row = max(1, -(-max(lengths) // page_size))
    pages = torch.randperm(per_row * len(lengths) + 2).int()
    shape = (len(pages), page_size, case.heads_kv, case.dim)
    k, v = torch.full(shape, NAN, dtype=case.dtype), torch.full(shape, NAN, dtype=case.dtype)
    table = torch.full((len(lengths), per_row), 10**8, dtype=torch.int32)
    for b, length in enumerate(lengths):
        for j in range(-(-length // page_size)):
            page, rows = pages[b * per_row + j], min(page_size, length - j * page_size)
            table[b, j] = page
            for x in (k, v):
                x[page, :rows] = torch.randn(rows, *shape[2:]).to(case.dtype)
    q = torch.randn(len(lengths), case.seq_q, case.heads, case.dim).to(case.dtype)
    return case.on(q, k, v, PagedKV(k, v, table, torch.tensor(lengths, dtype=torch.int32)))


def in_eight_bits(call: Call, dtype: torch.dtype, per: tuple[str | int, str | int] = ("tensor", "head")) -> Call:
    """The call with keys and values of 8 bits; what was garbage stays NaN. Heads differ in size, and keys are half as
    large as values."""
    sequence = call.sequence
    _, *given = sequence.operands(call.q, call.k, call.v).values()
    sizes = torch.arange(1, given[0].shape[-2] + 1)[:, None] / 2
    sized = (x.float() * sizes * factor for x, factor in zip(given, (0.5, 1), strict=True))
    k, v = (_stored(x, dtype, each) for x, each in zip(sized, per, strict=True))
    if isinstance(sequence, PagedKV):
        pages = {"k_pages": k.values, "v_pages": v.values}
        sequence = replace(sequence, **pages, k_scale=k.scale, v_scale=v.scale)
    else:
        assert isinstance(sequence, Dense | Ragged)
        sequence = replace(sequence, k_scale=k.scale, v_scale=v.scale)
    return replace(call, k=k.values, v=v.values, sequence=sequence)


def _stored(x: Tensor, dtype: torch.dtype, per: str | int) -> Quantized:
    made = quantize(x.nan_to_num(0.0), dtype, per=per)
    return Quantized(made.values.float().masked_fill(x.isnan(), NAN).to(dtype), made.scale)


def _offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def ready_of(call: Call, arch: str) -> CheckedCall:
    """The checked call, for the kernels of `arch`."""
    return replace(validate(replace(call, backend="reference")), backend=f"simulate:{arch}")


def prefill_choice(call: Call, arch: str, kind: str = "", **changes: Any) -> Choice:
    """A choice of the prefill kernel with other buffers than the planner's; `changes` to its config."""
    problem = ready_of(call, arch).problem
    config, _ = prefill_config(problem.element, problem.dim_qk, problem.dim_v, arch, kind)
    fields = {name: changes.pop(name) for name in ("k_strip", "v_strip", "slots") if name in changes}
    return Choice("prefill", replace(config, buffers=replace(config.buffers, **fields), **changes), (), (), ())


def decode_choice(call: Call, arch: str, partitions: int, **changes: Any) -> Choice:
    """The planner's choice with another number of partitions."""
    chosen = choose(ready_of(call, arch).problem, TARGETS[arch])
    return replace(chosen, partitions=partitions, config=replace(chosen.config, **changes))


def simulated(call: Call, arch: str, choice: Choice | None = None, **options: Any) -> tuple[Report, float, float]:
    """(report, largest error of the output relative to its tolerance, largest error of the LSE)."""
    ready = ready_of(call, arch)
    out, lse = outputs(call, ready)
    fitting = fitted(Operands(*call.sequence.operands(call.q, call.k, call.v).values(), out, lse, call.sinks))
    reports = [
        run_launch(step, Options(**options)) for step in launches_of_choice(ready, fitting, call.sequence, choice)
    ]
    main = max(reports, key=lambda report: report.steps)
    main.findings = [finding for report in reports for finding in report.findings]
    exact, exact_lse = reference(
        call.q,
        call.k,
        call.v,
        sequence=call.sequence,
        mask=call.mask,
        score=call.score,
        sinks=call.sinks,
        scale=call.scale,
    )
    return main, error(fitting.out.float(), exact), error(lse, exact_lse)


def check(call: Call, arch: str, choice: Choice | None = None, **options: Any) -> None:
    """The kernel's results are those of the reference, and nothing is found."""
    report, out, lse = simulated(call, arch, choice, **options)
    assert report.clean, str(report)
    assert out < TOLERANCE[call.q.dtype] and lse < 1e-4, (out, lse)


def outputs(call: Call, ready: CheckedCall) -> tuple[Tensor, Tensor]:
    """Output and LSE, poisoned."""
    out = torch.full((*call.q.shape[:-1], ready.problem.dim_v), NAN, dtype=call.q.dtype)
    return out, torch.full(ready.lse_shape, NAN)


def error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference; equal infinities differ by nothing, NaN by infinitely much."""
    same = actual == expected
    difference = torch.where(same, 0.0, (actual - expected).abs())
    return difference.nan_to_num(nan=float("inf")).max().item() if difference.numel() else 0.0
