"""Which Hopper kernel a problem gets, and the launches of a call."""

from __future__ import annotations

from dataclasses import replace

import torch

from warpattn.problem import CheckedCall, Problem, is_latent
from warpattn.problem.arch import ARCHS, Arch
from warpattn.problem.launch import BUILT_IN, DEFAULT_OPTIONS, Choice, Launch, PlanOptions
from warpattn.problem.operands import Operands
from warpattn.sequences import Sequence

from . import paged_ragged
from .candidates import candidates
from .decode import choice as decode
from .decode import launch as decode_launch
from .mla import config as mla
from .mla import launch as mla_launch
from .prefill import choice as prefill
from .prefill import launch as prefill_launch
from .prefill_varlen import config as prefill_varlen
from .prefill_varlen import launch as prefill_varlen_launch

LAUNCHES = {  # of a choice's kernel
    "prefill": prefill_launch.list_launches,
    "prefill_varlen": prefill_varlen_launch.list_launches,
    "decode": decode_launch.list_launches,
    "mla": mla_launch.list_launches,
    "paged_ragged": paged_ragged.list_launches,
}


def list_launches(checked: CheckedCall, x: Operands, sequence: Sequence, options: PlanOptions) -> tuple[Launch, ...]:
    """One launch of dense prefill, two of ragged batches and paged caches, one more for values of more than 256
    columns, one where keys are split and one where they are copied, if there is memory; one or two of decode; those of
    prefill and of decode for ragged queries over pages."""
    try:
        choice = choose(checked.problem, ARCHS["sm90"], options)
        return LAUNCHES[choice.kernel](checked, x, sequence, choice)
    except torch.OutOfMemoryError:
        if not options.copies:
            raise
    return list_launches(checked, x, sequence, replace(options, copies=False))


def choose(problem: Problem, target: Arch, options: PlanOptions = DEFAULT_OPTIONS) -> Choice:
    """Which kernel a problem gets; KeyError for a candidate that it does not have."""
    if options.candidate not in (None, BUILT_IN):
        return candidates(problem, target)[options.candidate]
    if problem.kind == "paged-ragged":
        return paged_ragged.choose(problem, target, options)
    if problem.seq_q <= decode.MAX_TOKENS and decode.serves(problem):
        return (mla if is_latent(problem) else decode).choose(problem, target, options=options)
    return (prefill if problem.kind == "dense" else prefill_varlen).choose(problem, target, options)
