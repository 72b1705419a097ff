"""Plans for engines: made once, called every step. No rules, no planning and no allocation in between.

    plan = wa.DecodePlan(q, kv, mask=wa.Causal())      checks, compiles, allocates output and workspace
    out = plan(q, kv)                                  writes addresses, launches

A plan owns its output and its workspace: the next call overwrites the result of this one, and a plan must not run twice
at the same time (one per stream). Calls may be captured into CUDA graphs; lengths, offsets and tables are read on the
device, so one graph serves every step. On the CPU a plan runs the reference.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from warpattn import cuda
from warpattn.check import AttentionError, Rules
from warpattn.kernels.sm90.launcher import captured_values
from warpattn.masks import Mask
from warpattn.operands import ALIGNMENT, Operands, addressable, captured
from warpattn.plan import steps
from warpattn.problem import Call, Ready, examine
from warpattn.reference import reference
from warpattn.repeat import Repeat, tensors_of
from warpattn.scores import Score
from warpattn.sequences import PagedKV, Ragged, Sequence
from warpattn.step import Step

__all__ = ["DecodePlan", "PrefillPlan"]

Result = Tensor | tuple[Tensor, Tensor]


class _ServingPlan:
    """What both plans share: the checked call, output and LSE, the bound launches."""

    def __init__(self, call: Call, batch_invariant: bool = False) -> None:
        ready = examine(call)
        self._call, self._ready = call, ready
        q = call.q
        self.out = q.new_empty((*q.shape[:-1], ready.problem.dim_v))
        self.lse = q.new_empty(ready.lse_shape, dtype=torch.float32) if call.return_lse else None
        self._repeat = None if ready.backend == "reference" else self._bind(call, ready, batch_invariant)
        self._captured = captured(ready)
        self._like = _described(call)

    def _bind(self, call: Call, ready: Ready, batch_invariant: bool) -> Repeat:
        operands = Operands(call.q, call.k, call.v, self.out, self.lse, call.sinks)
        rules = Rules()
        named = [*call.sequence.operands(call.q, call.k, call.v).items(), ("the output", self.out)]
        for name, x in named:
            what = f"{name} has shape {tuple(x.shape)}, strides {x.stride()} at {x.data_ptr()}"
            rules.require(addressable(x), what, "a plan makes no copies: rows must start at multiples of 16 bytes")
        if call.sinks is not None:
            fine = call.sinks.dtype == torch.float32 and call.sinks.is_contiguous()
            what = f"sinks has dtype {call.sinks.dtype} and strides {call.sinks.stride()}"
            rules.require(fine, what, "a plan makes no copies: sinks must be contiguous fp32")
        rules.done()
        device = call.q.get_device()
        with contextlib.nullcontext() if cuda.current_device() == device else torch.cuda.device(device):
            launches = _launches(ready, operands, call.sequence, batch_invariant)
            try:
                return Repeat(launches, ready, operands, call.sequence)
            except LookupError as error:
                raise AttentionError(f"the call cannot be planned: {error}; each must have its own memory") from error

    def _run(self, q: Tensor, k: Tensor, v: Tensor, sequence: Sequence, out: Tensor | None) -> Result:
        call = self._call
        new = Call(q, k, v, sequence, call.mask, call.score, call.sinks, call.scale, call.return_lse)
        described = _described(new)
        if described != self._like:
            _refuse(described, self._like)
        rows = len(q)
        if out is None:
            out = self.out if rows == len(self.out) else self.out[:rows]
        lse = self.lse
        if lse is not None and rows != len(self.out):
            lse = lse[:, :rows]
        if self._repeat is None:
            result, found = reference(q, k, v, sequence=sequence, mask=call.mask, score=call.score, sinks=call.sinks,
                                      scale=self._ready.scale)  # fmt: skip
            out.copy_(result)
            if lse is not None:
                lse.copy_(found)
        else:
            addresses = tuple(0 if x is None else x.data_ptr() for x in tensors_of(
                Operands(q, k, v, out, self.lse, call.sinks), sequence))  # fmt: skip
            if (addresses[0] | addresses[1] | addresses[2] | addresses[3]) % ALIGNMENT:
                raise AttentionError("a tensor starts in between; a plan's tensors must start at multiples of 16 bytes")
            self._repeat(addresses, captured_values(self._captured))
        return out if lse is None else (out, lse)


class DecodePlan(_ServingPlan):
    """Attention of new tokens over a paged cache, planned for tensors like `q` and `kv`.

    q (B, S, Hq, D): S new tokens a sequence (1 to 16 run on the decode kernel, more on prefill); kv as for
    `attention_paged`. With `batch_invariant` a sequence's result has the same bits whatever else is in the batch, at
    some cost in speed. Raises AttentionError listing every broken rule; a plan makes no copies, so tensors must be laid
    out for TMA as described in `warpattn.api`.
    """

    def __init__(
        self,
        q: Tensor,
        kv: PagedKV,
        *,
        mask: Mask | None = None,
        score: Score | None = None,
        sinks: Tensor | None = None,
        scale: float | None = None,
        return_lse: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        super().__init__(
            Call(q, kv.k_pages, kv.v_pages, kv, mask, score, sinks, scale, return_lse), batch_invariant
        )

    def __call__(self, q: Tensor, kv: PagedKV, out: Tensor | None = None) -> Result:
        """out (B, S, Hq, Dv), the plan's own or the given one; with return_lse also lse (B, Hq, S).

        Shapes, strides and dtypes are those of the plan; AttentionError names the first that is not.
        """
        return self._run(q, kv.k_pages, kv.v_pages, kv, out)


class PrefillPlan(_ServingPlan):
    """Attention over sequences laid end to end, planned for up to as many rows as `q`, `k` and `v` have.

    The number of sequences, heads and head dims are fixed; rows may be fewer in every call. The tail is that of
    `attention_varlen`. Raises AttentionError listing every broken rule.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seq: Ragged,
        *,
        mask: Mask | None = None,
        score: Score | None = None,
        sinks: Tensor | None = None,
        scale: float | None = None,
        return_lse: bool = False,
    ) -> None:
        super().__init__(Call(q, k, v, seq, mask, score, sinks, scale, return_lse))
        self._most = (len(q), len(k))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, seq: Ragged, out: Tensor | None = None) -> Result:
        """out (total_q, Hq, Dv), a part of the plan's own or the given one; with return_lse also lse (Hq, total_q)."""
        if len(q) > self._most[0] or len(k) > self._most[1]:
            raise AttentionError(f"q has {len(q)} and k {len(k)} rows; the plan was made for up to {self._most}")
        return self._run(q, k, v, seq, out)


def _launches(ready: Ready, x: Operands, sequence: Sequence, batch_invariant: bool) -> tuple[Step, ...]:
    if not batch_invariant:
        return steps(ready, x, sequence)
    from warpattn.kernels.sm90 import decode_steps
    from warpattn.target import ARCHS

    if ready.backend != "sm90" or not decode_steps.serves(ready.problem):
        return steps(ready, x, sequence)  # keys are never split there
    return decode_steps.steps(
        ready, x, sequence, decode_steps.choose(ready.problem, ARCHS["sm90"], batch_invariant=True)
    )


def _described(call: Call) -> tuple[Any, ...]:
    """What may not change between calls; rows of ragged batches may."""
    first = 1 if isinstance(call.sequence, Ragged) else 0
    tensors = [*call.sequence.operands(call.q, call.k, call.v).items(), *call.sequence.indices().items()]
    operands = len(tensors) - len(call.sequence.indices())
    return tuple(
        (name, tuple(x.shape[first if i < operands else 0 :]), x.stride(), x.dtype, x.device)
        for i, (name, x) in enumerate(tensors)
    )


def _refuse(new: tuple[Any, ...], planned: tuple[Any, ...]) -> None:
    """Raise the AttentionError that names the first difference."""
    for got, wanted in zip(new, planned, strict=True):
        if got != wanted:
            name, shape, strides, dtype, device = got
            what = f"{name} has shape {shape}, strides {strides}, {dtype} on {device}"
            rule = f"the plan was made for {wanted[1]}, strides {wanted[2]}, {wanted[3]} on {wanted[4]}"
            raise AttentionError(f"{what}; {rule}")
