"""Ring attention: keys and values pass from rank to rank, queries stay.

    step 0    own keys                     ── meanwhile own keys are sent to rank + 1
    step 1    keys of rank - 1             ── and so on, until every rank has attended to all keys that it sees
    backward  the same again; gradients of keys pass along with them and are sent home by the last rank

The backward computes each block's share of the gradients from the results over all keys, so only q, k, v, out and LSE
are saved. Sums over blocks are in fp32 (fp64), in the order of the ring: the same bits in every run if the backend's
gradients are deterministic.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple
from typing import cast as typed

import torch
from torch import Tensor

from warpattn.distributed.blocks import Block, Blocks
from warpattn.distributed.exchange import Messages, pass_on
from warpattn.distributed.merge import Merged, Sum, weight
from warpattn.distributed.ranks import Ranks
from warpattn.problem import Call
from warpattn.runtime import execute
from warpattn.runtime.training.autograd import taken_once
from warpattn.runtime.training.from_results import differentiate
from warpattn.runtime.training.gradients import Along, Saved
from warpattn.runtime.training.unchanged import check_unchanged, versions


class Ring(NamedTuple):
    """A ring without its tensors. `call` has the options; its tensors are not used."""

    ranks: Ranks
    blocks: Blocks
    call: Call

    @property
    def steps(self) -> int:
        """How many blocks each rank gets, its own included."""
        return self.blocks.steps

    def source(self, step: int) -> int:
        """Return the rank whose keys are here in a step."""
        return (self.ranks.rank - step) % self.ranks.size

    def part(self, step: int) -> list[Block]:
        """Return the calls of a step."""
        return self.blocks.of(self.ranks.rank, self.source(step))


def attend(ring: Ring, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute out (B, S, Hq, Dv), LSE (B, Hq, S) of this rank's queries over all ranks' keys, with gradients."""
    score = ring.blocks.score
    captured = () if score is None else score.program().tensors
    return typed("tuple[Tensor, Tensor]", _Ring.apply(ring, q, k, v, sinks, *captured))


class _Ring(torch.autograd.Function):
    """The ring as an autograd function. Its tensors are separate arguments, so that autograd sees them."""

    @staticmethod
    def forward(ctx: Any, ring: Ring, *tensors: Tensor | None) -> Any:
        q, k, v, sinks, *captured = tensors
        assert q is not None and k is not None and v is not None
        out, lse = forward(ring, q, k, v, sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks, *captured)
        ctx.set_materialize_grads(False)
        ctx.ring, ctx.seen = ring, versions(ring.blocks.whole.mask.program().tensors, {})
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        _, need_q, need_k, need_v, need_sinks, *need_captured = ctx.needs_input_grad
        check_unchanged(ctx.seen)
        q, k, v, out, lse, sinks, *captured = kept = ctx.saved_tensors
        wanted = [x for x, need in zip(captured, need_captured, strict=True) if need]
        with torch.no_grad():
            x = Saved(q, k, v, out, lse, sinks)
            along = Along(*gradients)
            dq, dk, dv, *found = backward(ctx.ring, x, along, wanted)
            dsinks = sink_gradient(x, along) if need_sinks else None
        given = [g if need else None for g, need in ((dq, need_q), (dk, need_k), (dv, need_v))]
        rest = iter(found)
        given += [dsinks, *(next(rest) if need else None for need in need_captured)]
        return None, *taken_once(given, (*kept, *gradients))


def forward(ring: Ring, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute out and LSE of this rank's queries."""
    merged, here = Merged(ring.blocks.rows(ring.ranks.rank)), [k.contiguous(), v.contiguous()]
    dim_v = v.shape[-1]
    for step in range(ring.steps):
        passing = _pass(ring, step, here)
        k, v = here
        for block in ring.part(step):
            given = sinks if merged.lacks_sinks(block.rows) else None
            options = {"mask": block.mask, "score": block.score, "sinks": given}
            part = replace(ring.call, q=q[:, block.rows], k=k[:, block.keys], v=v[:, block.keys], **options)
            out, lse = typed("tuple[Tensor, Tensor]", execute.attend(part))
            merged.add(block.rows, out, lse, given is not None)
        here = here if passing is None else passing.wait()
    return merged.result(q, dim_v, sinks)


def backward(ring: Ring, x: Saved, along: Along, captured: list[Tensor]) -> list[Tensor]:
    """Compute dq, dk and dv of this rank, and its shares of the gradients of captured tensors."""
    here, everything = [t.contiguous() for t in (x.k, x.v)], slice(None)
    passed: Messages | None = None
    dq, more = Sum(x.q), [Sum(t) for t in captured]
    sums = [Sum(t) for t in here]
    for step in range(ring.steps):
        passing = _pass(ring, step, here)
        sums = [Sum(t) for t in here]
        k, v = here
        for block in ring.part(step):
            mine, dk, dv, *shares = _share(ring, block, x._replace(k=k, v=v), along, captured)
            dq.add(block.rows, mine)
            for total, share in zip(sums, (dk, dv), strict=True):
                total.add(block.keys, share)
            for total, share in zip(more, shares, strict=True):
                total.add(everything, share)
        for total, before in zip(sums, (None, None) if passed is None else passed.wait(), strict=True):
            total.add(everything, before)
        passed = pass_on([total.exact() for total in sums], ring.ranks) if step + 1 < ring.steps else None
        here = here if passing is None else passing.wait()
    totals = [total.rounded() for total in sums]
    home = pass_on(totals, ring.ranks, 1 - ring.steps).wait() if ring.steps > 1 else totals
    return [dq.rounded(), *home, *(total.rounded() for total in more)]


def sink_gradient(x: Saved, along: Along) -> Tensor:
    """Compute this rank's share of the gradient of the sinks (H,)."""
    assert x.sinks is not None
    exact = x.lse.dtype
    p = weight(x.sinks.to(exact)[:, None].expand_as(x.lse), x.lse)
    moved = torch.zeros_like(x.lse) if along.dlse is None else along.dlse
    if along.dout is not None:
        moved = moved - (along.dout.to(exact) * x.out.to(exact)).sum(-1).mT
    return (p * moved).sum((0, 2)).to(x.sinks.dtype)


def _pass(ring: Ring, step: int, here: list[Tensor]) -> Messages | None:
    """Send keys to the next rank, unless this step is the last."""
    return pass_on(here, ring.ranks) if step + 1 < ring.steps else None


def _share(ring: Ring, block: Block, x: Saved, along: Along, captured: list[Tensor]) -> list[Tensor]:
    """Compute a block's part of the gradients of q, k, v and captured tensors; `x` has this step's k and v."""
    rows, keys = block.rows, block.keys
    part = Saved(x.q[:, rows], x.k[:, keys], x.v[:, keys], x.out[:, rows], x.lse[..., rows].contiguous(), None)
    dout = torch.zeros_like(part.out) if along.dout is None else along.dout[:, rows]
    dlse = None if along.dlse is None else along.dlse[..., rows].contiguous()
    call = replace(ring.call, q=part.q, k=part.k, v=part.v, mask=block.mask, score=block.score)
    return differentiate(call, part, Along(dout, dlse), captured)
