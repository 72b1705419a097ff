"""Ragged queries over a paged cache on Hopper: sequences of few queries go to decode, others to prefill.

      cu_q, lengths ──▶ decode            takes sequences with 1 to `tokens` queries; gives others no units of work
                    ──▶ order, prefill    takes sequences with more queries; gives others no query blocks

Where copies of keys pay off there are two prefills: copies/places.py decides which sequences' keys are copied, in 16
bits and whole tiles, into a workspace, a plan's or a call's own. One prefill attends for these and reads the copies,
the other for the other sequences and reads the pages.

All read the offsets on the device and skip each other's sequences, so the host needs no lengths and the number of
launches is fixed. With `max_q` up to `MOST_DECODED` there is no prefill. With `batch_invariant` there is no decode,
since the other tokens of a step must not decide a token's kernel. Latent attention always has such a `max_q`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from warpattn.kernels.pieces.scheduler_sizes import ListedSequences
from warpattn.problem import CheckedCall, Problem, is_latent
from warpattn.problem.arch import Arch
from warpattn.problem.launch import DEFAULT_OPTIONS, MOST_DECODED, Choice, Launch, PlanOptions
from warpattn.problem.operands import Operands
from warpattn.sequences import PagedRagged

from .copies.config import workspace_bytes
from .copies.launch import in_places
from .decode import choice as decode
from .decode import launch as decode_launch
from .mla import config as mla
from .mla import launch as mla_launch
from .prefill_varlen import launch as prefill_varlen
from .prefill_varlen.config import choose as choose_prefill
from .prefill_varlen.config import choose_over_places


@dataclass(frozen=True)
class PagedRaggedConfig:
    """The choices of decode and of prefill, over pages and over copies; at least one is not None."""

    tokens: int  # decode takes sequences of at most so many queries
    few: Choice | None  # decode; None: prefill takes every sequence
    many: Choice | None  # prefill; None: no sequence has more than `tokens` queries
    long: Choice | None = None  # prefill over copies of keys in a workspace; `many` has the other sequences
    workspace_bytes: int = 0
    workspace: Tensor | None = field(default=None, compare=False)  # the caller's; None: a call has one of its own


def few_tokens(problem: Problem, options: PlanOptions = DEFAULT_OPTIONS) -> int:
    """Most queries of a sequence that decode takes: `max_q`, if decode can, else the plan's `decoded`, at least as many
    as its narrowest tile holds, which decodes single tokens 3 to 6 % faster than the next wider one (H200,
    bench/notes.md)."""
    if problem.max_q <= MOST_DECODED:
        return problem.max_q
    narrowest = decode.SWAP_AB_COLUMNS[0] // (problem.heads_q // problem.heads_kv)
    return min(MOST_DECODED, max(1, narrowest, options.decoded))


def choose(problem: Problem, target: Arch, options: PlanOptions = DEFAULT_OPTIONS) -> Choice:
    """The choice for a `problem` that has queries and keys."""
    if options.batch_invariant and not is_latent(problem):
        many = choose_prefill(problem, target, options)
        reasons = ("batch invariant: prefill attends for sequences of any number of queries", *many.reasons)
        config = PagedRaggedConfig(0, None, many)
        return Choice("paged_ragged", config, many.grid, many.lines, reasons, order=many.order)
    tokens = few_tokens(problem, options)
    few = (mla if is_latent(problem) else decode).choose(replace(problem, seq_q=tokens), target, options=options)
    split_why = f"sequences of 1 to {tokens} queries are decoded: their rows of a key head fit one tile"
    if problem.max_q <= tokens:
        reasons = (split_why, *few.reasons)
        config = PagedRaggedConfig(tokens, few, None)
        return Choice("paged_ragged", config, few.grid, few.lines, reasons, partitions=few.partitions)
    size = workspace_bytes(problem, options)
    long = choose_over_places(problem, target, size) if size else None
    many = choose_prefill(problem, target, replace(options, copies=False))
    named = {"decode": few, "prefill": many} | ({} if long is None else {"prefill over copies": long})

    def lines() -> tuple[str, ...]:
        return tuple(f"{name}: {line}" for name, choice in named.items() for line in choice.lines())

    config = PagedRaggedConfig(tokens, few, many, long, size, options.workspace)
    reasons = split_why, *(reason for choice in named.values() for reason in choice.reasons)
    return Choice("paged_ragged", config, few.grid, lines, reasons, partitions=few.partitions, order=many.order)


def list_launches(checked: CheckedCall, x: Operands, sequence: PagedRagged, choice: Choice) -> tuple[Launch, ...]:
    """The launches of prefill, over copies in the workspace first, then those of decode, unless ruled out."""
    config: PagedRaggedConfig = choice.config
    launches: tuple[Launch, ...] = ()
    only = ListedSequences(config.tokens + 1, sequence.kv.lengths.contiguous())
    if config.long is not None:
        workspace = config.workspace
        if workspace is None:
            workspace = torch.empty(config.workspace_bytes, dtype=torch.uint8, device=x.q.device)
        step = in_places(checked, x, sequence, workspace)
        only = only._replace(ends=step.lists.ends, capacity=step.capacity, copied=1)
        over_copies = prefill_varlen.list_launches(checked, step.x, step.sequence, config.long, only)
        launches, only = (*step.launches, *over_copies), only._replace(copied=-1)
    if config.many is not None:
        launches += prefill_varlen.list_launches(checked, x, sequence, config.many, only)
    if config.few is not None:
        few = replace(checked, problem=replace(checked.problem, seq_q=config.tokens))
        attend = mla_launch if config.few.kernel == "mla" else decode_launch
        launches += attend.list_launches(few, x, sequence, config.few)
    return launches
