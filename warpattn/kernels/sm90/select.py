"""Chooses the Hopper kernel of a problem and lists the launches of a call."""

from __future__ import annotations

from dataclasses import replace

import torch

from warpattn.problem import CheckedCall, Problem, is_latent
from warpattn.problem.arch import ARCHS, Arch
from warpattn.problem.launch import BUILT_IN, DEFAULT_OPTIONS, MOST_DECODED, Choice, Launch, PlanOptions
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

LAUNCHES = {  # by `Choice.kernel`
    "prefill": prefill_launch.list_launches,
    "prefill_varlen": prefill_varlen_launch.list_launches,
    "decode": decode_launch.list_launches,
    "mla": mla_launch.list_launches,
    "paged_ragged": paged_ragged.list_launches,
}


def list_launches(checked: CheckedCall, x: Operands, sequence: Sequence, options: PlanOptions) -> tuple[Launch, ...]:
    """The launches of a call, in order. Dense prefill has one, ragged and paged prefill two (the first orders tiles);
    values of more than 256 columns, split keys and copied keys each add one. Decode has one or two. If there is no
    memory for the copies of keys, plans again without them."""
    try:
        choice = choose(checked.problem, options.target or ARCHS["sm90"], options)
        return LAUNCHES[choice.kernel](checked, x, sequence, choice)
    except torch.OutOfMemoryError:
        if not options.copies:
            raise
    return list_launches(checked, x, sequence, replace(options, copies=False))


def choose(problem: Problem, target: Arch, options: PlanOptions = DEFAULT_OPTIONS) -> Choice:
    """Chooses kernel and configuration for a problem; KeyError for an unknown `options.candidate`."""
    if options.candidate not in (None, BUILT_IN):
        return candidates(problem, target)[options.candidate]
    if problem.kind == "paged-ragged":
        return paged_ragged.choose(problem, target, options)
    if problem.seq_q <= MOST_DECODED and decode.serves(problem):
        return (mla if is_latent(problem) else decode).choose(problem, target, options=options)
    return (prefill if problem.kind == "dense" else prefill_varlen).choose(problem, target, options)
