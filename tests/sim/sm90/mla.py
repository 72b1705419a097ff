"""Latent attention for tests: queries of 576, a cache of [latent 512 | rotary 64], whose latents are the values."""

from __future__ import annotations

import linecache
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.oracle import UNWRITTEN
from tests.sim.sm90.decode import Ran, built, paged
from tests.sim.sm90.prefill import error
from warpattn.kernels.sm90.decode.config import with_fields
from warpattn.kernels.sm90.mla.config import choose
from warpattn.kernels.sm90.mla.launch import list_launches
from warpattn.masks import Mask
from warpattn.problem import Call, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.backends import LATENT
from warpattn.problem.launch import PlanOptions
from warpattn.problem.operands import Operands
from warpattn.reference import reference
from warpattn.scores import Score
from warpattn.sequences import Dense, PagedKV
from warpattn.sim import KnockOut, simulate

DIM, DIM_V = LATENT
SCALE = 192**-0.5  # of a model whose heads had 128 + 64 before they were absorbed


@dataclass(frozen=True, eq=False)
class Latent:
    """A problem: `lengths` keys of each sequence, in pages of `page` keys or dense (equally long)."""

    lengths: tuple[int, ...]
    page: int = 0
    tokens: int = 1
    heads: int = 16
    dtype: torch.dtype = torch.bfloat16
    mask: Mask | None = None
    score: Score | None = None
    sinks: bool = False
    invariant: bool = False
    swap_ab: bool = False  # queries as the right operands
    config: tuple[tuple[str, Any], ...] = ()  # fields that differ from the chosen configuration, see `with_fields`
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Inputs:
    """q (B, T, H, 576); k (B, S, 1, 576), or pages of it; its view v (…, 512); sequence; sinks (H,) or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    sequence: Dense | PagedKV
    sinks: Tensor | None

    def call(self, case: Latent, backend: str = "reference") -> Call:
        options = (case.mask, case.score, self.sinks, SCALE, True, None, backend)
        return Call(self.q, self.k, self.v, self.sequence, *options)

    def expected(self, case: Latent) -> tuple[Tensor, Tensor]:
        """The reference's out and lse."""
        options = {"mask": case.mask, "score": case.score, "sinks": self.sinks, "scale": SCALE}
        return reference(self.q, self.k, self.v, sequence=self.sequence, **options)


def tensors(case: Latent, first: Inputs | None = None, device: str = "cpu") -> Inputs:
    """Inputs of a case, the first sequence's queries and keys those of `first` (dense); pages lie in random order, and
    whatever no sequence owns is NaN."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype)

    batch, longest = len(case.lengths), max(case.lengths)
    q, k = normal(batch, case.tokens, case.heads, DIM), normal(batch, longest, 1, DIM)
    if first is not None:
        q[0], k[0, : first.k.shape[1]] = first.q[0].to("cpu"), first.k[0].to("cpu")
    sinks = torch.randn(case.heads, generator=generator).to(device) if case.sinks else None
    if not case.page:
        k = k.to(device)
        return Inputs(q.to(device), k, k[..., :DIM_V], Dense(), sinks)
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    kv = paged(k, k[..., :DIM_V], lengths, case.page, generator)
    pages = kv.k_pages.to(device)
    sequence = PagedKV(pages, pages[..., :DIM_V], kv.block_table.to(device), kv.lengths.to(device))
    return Inputs(q.to(device), pages, sequence.v_pages, sequence, sinks)


def run(case: Latent, programs: int = 2, kernel: Any = None, first: Inputs | None = None, **options: Any) -> Ran:
    """Simulate a case with `programs` CTAs; outputs and everything that must not be read start as NaN. `kernel` changes
    the compiled kernel."""
    x = tensors(case, first)
    ready = validate(x.call(case), read_values=False)
    out = torch.full((*x.q.shape[:3], DIM_V), float("nan"), dtype=case.dtype)
    lse = torch.full(ready.lse_shape, float("nan"))
    terms = PlanOptions(batch_invariant=case.invariant)
    choice = choose(ready.problem, ARCHS["sm90"], options=terms, swap_ab=case.swap_ab)
    choice = replace(choice, config=with_fields(choice.config, dict(case.config)))
    step, *after = list_launches(ready, Operands(x.q, x.k, x.v, out, lse, x.sinks), x.sequence, choice)
    step.args["workspace"].o.fill_(float("nan"))
    step.args["workspace"].denominators.fill_(UNWRITTEN)
    step.args["workspace"].heads.fill_(1 << 20)  # parts of a launch before
    compiled = built(step) if kernel is None else kernel(built(step))
    programs = max(programs, step.persistent)
    report = simulate(compiled, (programs,), step.args, **options)
    for combine in after:
        report.findings += simulate(built(combine), combine.grid, combine.args, **options).findings
    want, want_lse = x.expected(case)
    tickets = step.args["workspace"].tickets
    return Ran(report, out, lse, error(out.float(), want.float()), error(lse, want_lse), tickets)


CLEARED = "attend_swap_ab.py:    left = without_hidden(ctx, left, half_tile(ctx, slots.left), item, i, 1)"
ROTARY = "load.py:        load_rope(ctx, slots.rope, item, boxes)"
CONVERTED = "eight_bit.py:        load_rope(ctx, slots.rope, item, boxes)"
NARROW = "eight_bit.py:        copy_part(ctx, ctx.rings.k, slots.rope, ctx.keys.k.desc, item, boxes, 0)"
ACQUIRED = "eight_bit.py:    ring.producer_acquire(slot)"

# Of knock-outs: operation, what is in its lines of Python (file and text), why it can go.
REDUNDANT = [
    ("ttng.fence_async_shared", ("kernel.py:    fence_async_shared()",), "for new barriers and TMA: not modelled"),
    ("ttng.wait_barrier", ("attend.py:    rings.v.consumer_wait(slot)",), "the probabilities' maker has waited for it"),
    ("ttng.fence_async_shared", (CLEARED, "finite.py:    fence_async_shared()"), "the right half's follows"),
    ("ttng.wait_barrier", (ROTARY,), "of the tile that had the slot, a half was given back since"),
    ("ttng.wait_barrier", (CONVERTED,), "both halves were given back after P was read"),
    ("ttng.wait_barrier", (NARROW, ACQUIRED), "both halves were given back after P was read"),
]


def reason(found: KnockOut) -> str | None:
    lines = [f"{Path(file).name}:{linecache.getline(file, line).rstrip()}" for file, line in found.frames]
    for op, texts, why in REDUNDANT:
        if found.op == op and all(text in lines for text in texts):
            return why
    return None
