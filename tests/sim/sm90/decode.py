"""Runs the Hopper decode kernel in the simulator: lengths, pages, splits and faults, without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bench.decode.own import over
from tests.oracle import UNWRITTEN
from tests.sim.sm90.prefill import error
from warpattn.kernels.sm90.decode.choice import choose, queues_of
from warpattn.kernels.sm90.decode.config import with_fields
from warpattn.kernels.sm90.decode.launch import list_launches
from warpattn.masks import Mask
from warpattn.problem import Call, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.launch import DEFAULT_OPTIONS, PlanOptions
from warpattn.problem.operands import Operands
from warpattn.quantized import quantize, saturated
from warpattn.reference import reference
from warpattn.scores import Score
from warpattn.sequences import Dense, PagedKV
from warpattn.sim import DependentGrid, Report, simulate
from warpattn.sim.compile import to_ttgir

_built: dict[Any, Any] = {}


@dataclass(frozen=True, eq=False)
class Decode:
    """A decode problem: `lengths` keys of each sequence, in pages of `page` keys or dense (equally long)."""

    lengths: tuple[int, ...]
    page: int = 0
    tokens: int = 1
    heads: int = 4
    heads_kv: int = 1
    dim: int = 64
    dim_v: int = 0
    dtype: torch.dtype = torch.bfloat16
    mask: Mask | None = None
    score: Score | None = None
    sinks: bool = False
    invariant: bool = False
    kv_ready: bool = False  # before the preceding kernel ends: see `preceding_writes`
    behind: bool = False  # a preceding kernel still runs, as it does with `kv_ready`
    stored: torch.dtype | None = None  # of 8-bit keys and values
    per: tuple[str | int | None, str | int | None] = ("head", "head")  # what their scales belong to
    config: tuple[tuple[str, Any], ...] = ()  # fields that differ from the chosen configuration, see `with_fields`
    replanned: bool = False  # has the schedule of the CTAs given, else that of the card's and at least its queues
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Ran:
    """What a simulated decode gave, and how far it is from the reference."""

    report: Report
    out: Tensor
    lse: Tensor
    out_error: float
    lse_error: float
    tickets: Tensor
    parts: int = 0  # slots of the workspace that were written


def run(
    case: Decode, programs: int = 3, kernel: Any = None, table: Any = None, first: Any = None, **options: Any
) -> Ran:
    """Simulate a case with `programs` CTAs; outputs and everything that must not be read start as NaN.

    kernel: changes the compiled kernel; table: replaces the block table; first: (q, k, v) of the first sequence.
    """
    q, dense, sequence, sinks = tensors(case, first)
    if table is not None:
        sequence = replace(sequence, block_table=table)
    k, v = (sequence.k_pages, sequence.v_pages) if isinstance(sequence, PagedKV) else dense
    call = Call(q, k, v, sequence, case.mask, case.score, sinks, None, True, backend="reference")
    ready = validate(call, read_values=False)
    out = torch.full((*q.shape[:3], v.shape[-1]), float("nan"), dtype=case.dtype)
    lse = torch.full(ready.lse_shape, float("nan"))
    choice = choose(ready.problem, ARCHS["sm90"], options=PlanOptions(case.invariant, case.kv_ready))
    if case.replanned:
        choice = over(choice, ready.problem, programs)
    else:
        queues = queues_of(ready.problem, *choice.grid)
        programs = -(-programs // queues) * queues
    choice = replace(choice, config=with_fields(choice.config, dict(case.config)), grid=(programs,))
    step, *after = list_launches(ready, Operands(q, k, v, out, lse, sinks), sequence, choice)
    step.args["workspace"].o.fill_(float("nan"))
    step.args["workspace"].denominators.fill_(UNWRITTEN)
    step.args["workspace"].heads.fill_(1 << 20)  # parts of a launch before
    compiled = built(step) if kernel is None else kernel(built(step))
    grid = DependentGrid((programs,), preceding_writes(step, k, v, sequence, case))
    report = simulate(compiled, grid, step.args, **options)
    for following in after:
        added = simulate(built(following), following.grid, following.args, **options)
        report.findings += added.findings
    parts = int((step.args["workspace"].denominators != UNWRITTEN).any(1).sum())
    if table is not None:
        return Ran(report, out, lse, 0.0, 0.0, step.args["workspace"].tickets, parts)
    expected, expected_lse = reference(q, k, v, sequence=sequence, mask=case.mask, score=case.score, sinks=sinks)
    tickets = step.args["workspace"].tickets
    return Ran(report, out, lse, error(out.float(), expected.float()), error(lse, expected_lse), tickets, parts)


def preceding_writes(step: Any, k: Tensor, v: Tensor, sequence: Dense | PagedKV, case: Decode) -> list[Tensor]:
    """What the preceding kernel may still write: every argument, or, with `kv_ready`, all but lengths, table, and keys
    and values of older tokens. The newest ones of dense keys are their last rows."""
    if not (case.behind or case.kv_ready):
        return []
    args = step.args
    partial = args["workspace"]
    written = [args["q"].pointer, args["out"].pointer, args["lse_ptr"]]
    written += [partial.o, partial.denominators, partial.tickets, partial.heads]
    if not case.kv_ready:
        return [*written, k, v, *(x for x in (args["keys"].lengths, args["keys"].table) if x is not None)]
    for b, own in enumerate(case.lengths):
        length = own if case.page else k.shape[1]
        for at in range(max(0, length - case.tokens), length):
            page, row = (int(sequence.block_table[b, at // case.page]), at % case.page) if case.page else (b, at)
            written += [x[page, row] for x in (k, v)]
    return written


def built(step: Any) -> Any:
    """The step's kernel down to TTGIR; each is compiled once."""
    key = (step.name, step.key)
    if key not in _built:
        from triton.backends.compiler import GPUTarget

        target = GPUTarget("cuda", {"sm90": 90, "sm100": 100}[step.arch], 32)
        _built[key] = to_ttgir(step.source(), target, dict(step.options))
    return _built[key]


def tensors(case: Decode, first: Any = None) -> tuple[Tensor, tuple[Tensor, Tensor], Dense | PagedKV, Tensor | None]:
    """q, dense (k, v), sequence, sinks. Pages lie in random order; whatever no sequence owns is NaN."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype)

    batch, longest = len(case.lengths), max(case.lengths)
    q = normal(batch, case.tokens, case.heads, case.dim)
    k = normal(batch, longest, case.heads_kv, case.dim)
    v = normal(batch, longest, case.heads_kv, case.dim_v or case.dim)
    for x, given in zip((q, k, v), first or (), strict=False):
        x[0, : given.shape[1]] = given[0]
    sinks = torch.randn(case.heads, generator=generator) if case.sinks else None
    sequence: Dense | PagedKV = Dense()
    if case.page:
        lengths = torch.tensor(case.lengths, dtype=torch.int32)
        sequence = paged(k, v, lengths, case.page, generator)
    if case.stored is not None:
        (k, v), sequence = in_eight_bits(case, k, v, sequence)
    return q, (k, v), sequence, sinks


def in_eight_bits(case: Decode, k: Tensor, v: Tensor, sequence: Dense | PagedKV) -> tuple[Any, Dense | PagedKV]:
    """Keys and values of a case, whose heads have different sizes, in 8 bits; whatever no sequence owns stays NaN."""
    assert case.stored is not None
    size = torch.linspace(0.5, 6.0, case.heads_kv)[:, None]
    given = (sequence.k_pages, sequence.v_pages) if isinstance(sequence, PagedKV) else (k, v)
    made, scales = [], []
    for x, per, factor in zip(given, case.per, (1.0, 0.2), strict=True):
        x = x.float() * size * factor
        known = quantize(x.nan_to_num(0.0), case.stored, per=per or "tensor")
        values = known.values if per is not None else saturated(x.nan_to_num(0.0), case.stored)
        made.append(values.float().masked_fill(x.isnan(), float("nan")).to(case.stored))
        scales.append(known.scale if per is not None else None)
    if isinstance(sequence, PagedKV):
        pages = replace(sequence, k_pages=made[0], v_pages=made[1], k_scale=scales[0], v_scale=scales[1])
        return (k, v), pages
    return tuple(made), Dense(*scales)


def paged(k: Tensor, v: Tensor, lengths: Tensor, page: int, generator: torch.Generator) -> PagedKV:
    """Keys and values of `lengths` rows in shuffled pages; two pages are of no sequence, table entries past the end are
    out of range."""
    used = [-(-int(n) // page) for n in lengths]
    table = torch.full((len(used), max(*used, 1) + 1), 2**30, dtype=torch.int32)
    free = torch.randperm(sum(used) + 2, generator=generator)
    pages = [torch.full((len(free), page, *x.shape[2:]), float("nan"), dtype=x.dtype) for x in (k, v)]
    at = 0
    for b, count in enumerate(used):
        table[b, :count] = free[at : at + count]
        for t in range(count):
            rows = slice(t * page, min(t * page + page, int(lengths[b])))
            for cache, x in zip(pages, (k, v), strict=True):
                cache[free[at + t], : rows.stop - rows.start] = x[b, rows]
        at += count
    return PagedKV(*pages, table, lengths)


def check(case: Decode, programs: int = 3, **options: object):
    """Run a case; right, without findings, and with every ticket put back."""
    ran = run(case, programs, **options)
    assert ran.report.clean, ran.report
    assert ran.out_error < (2e-2 if case.dtype == torch.bfloat16 else 3e-3)
    assert ran.lse_error < 1e-4
    assert not ran.tickets.any(), "tickets are left as they were found"
    return ran


def of_shape(batch: int, keys: int, options: PlanOptions = DEFAULT_OPTIONS, dim: int = 128):
    """The configuration for 32 query heads on 8 key heads."""
    q = torch.empty(batch, 1, 32, dim, dtype=torch.bfloat16)
    k = torch.empty(batch, 1, 8, dim, dtype=torch.bfloat16).expand(-1, keys, -1, -1)
    ready = validate(Call(q, k, k, Dense(), backend="reference"), read_values=False)
    return choose(ready.problem, ARCHS["sm90"], options=options).config
