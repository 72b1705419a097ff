"""Keeps a `StepPlan` per size of engine steps, shared by all layers with equal options.

    step ─▶ sizes rounded up to powers of two ─▶ StepPlan ─▶ launches, with the step's own addresses and requests

Rounding keeps plans few, whatever engines capture and schedule: each plan holds a workspace and must live as long as a
captured graph uses it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpattn.masks import Mask
from warpattn.scores import ALiBi, Score, SoftCap
from warpattn.sequences import PagedKV, Ragged
from warpattn.sequences.latent_query import LatentQuery, of_parts, parted
from warpattn.serving import StepPlan, StepWorkspace, outside_captures
from warpattn.serving.step_plan import MOST_DECODED


class ScoreOptions(NamedTuple):
    """The options of a layer's score; equal ones share a score and its tensors."""

    soft_cap: float | None
    slopes: tuple[float, ...] | None


@cache
def layer_score(options: ScoreOptions, device: torch.device) -> Score | None:
    """Make the score: soft-cap first, then ALiBi, with slopes given as numbers."""
    score = SoftCap(options.soft_cap) if options.soft_cap else None
    if options.slopes is None:
        return score
    with outside_captures(device):
        alibi = ALiBi(torch.tensor(options.slopes, dtype=torch.float32, device=device))
    return alibi if score is None else score | alibi


class LayerModifiers(NamedTuple):
    """Mask, score and scale of a layer, by value."""

    mask: Mask
    score: ScoreOptions
    scale: float

    def tail(self, device: torch.device) -> dict[str, Any]:
        """Return the keywords of `attention`, without sinks."""
        return {"mask": self.mask, "score": layer_score(self.score, device), "scale": self.scale}


class StepPlans:
    """The plans of one metadata builder, whose steps never overlap. `decoded`: most new tokens of a decoding request,
    drafts included; steps without longer requests have separate plans. batch_invariant: see `StepPlan`."""

    def __init__(self, decoded: int = 1, *, batch_invariant: bool = False) -> None:
        self.decoded = decoded
        self.batch_invariant = batch_invariant
        self._plans: dict[Any, StepPlan] = {}
        self._workspace = StepWorkspace()

    def attend(
        self,
        layer: LayerModifiers,
        q: Tensor | LatentQuery,
        kv: PagedKV,
        seq: Ragged,
        out: Tensor,
        sinks: Tensor | None,
        step: object = None,
    ) -> None:
        """Attend a step and write to `out`; `step` as for a call of `StepPlan`."""
        rows, rotary = parted(q)
        bound = self.bound_of(seq)
        tokens, requests = rounded(len(rows)), rounded(len(kv.lengths))
        read = (rows, *rotary.values(), kv.k_pages, *kv.indices().values())
        like = tuple([(x.shape[1:], x.stride(), x.dtype) for x in read])
        key = (layer, sinks is None, bound, tokens, requests, len(kv.k_pages), like)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._make(layer, q, kv, (tokens, requests, bound), sinks)
        plan(q, kv, seq, out, sinks, step=step)

    def _make(
        self, layer: LayerModifiers, q: Tensor | LatentQuery, kv: PagedKV, sizes: tuple[int, int, int | None],
        sinks: Tensor | None,
    ) -> StepPlan:  # fmt: skip
        """Make a plan for steps like this one of up to (tokens, requests, tokens of a request)."""
        tokens, requests, bound = sizes
        rows, rotary = parted(q)
        largest = of_parts(*(like_rows(x, tokens) for x in (rows, *rotary.values())))
        pages = kv.with_fields(
            block_table=like_rows(kv.block_table, requests), lengths=kv.lengths.new_empty(requests)
        )
        seq = Ragged(kv.lengths.new_empty(requests + 1), max_q=bound)
        own = {"sinks": sinks, "batch_invariant": self.batch_invariant, "decoded": min(self.decoded, MOST_DECODED)}
        tail = layer.tail(rows.device) | own
        if bound is None and not self.batch_invariant:
            tail["workspace"] = self._workspace.of(kv, layer.mask)
        return StepPlan(largest, pages, seq, **tail)

    def bound_of(self, seq: Ragged) -> int | None:
        """Return the bound that a step's plan promises: one of few, since each has its own kernels."""
        if seq.max_q is None or seq.max_q > self.decoded:
            return None
        return 1 if seq.max_q <= 1 else self.decoded


def like_rows(x: Tensor, rows: int) -> Tensor:
    """Return uninitialised rows like those of `x`."""
    return x.new_empty(0).new_empty_strided((rows, *x.shape[1:]), x.stride())


def rounded(number: int) -> int:
    """Round up to a power of two."""
    return 1 << max(number - 1, 0).bit_length()
