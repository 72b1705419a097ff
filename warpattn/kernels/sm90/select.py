"""Which Hopper kernel a problem gets, and the launches of a call."""

from __future__ import annotations

from warpattn.problem import CheckedCall, Problem, is_latent
from warpattn.problem.arch import ARCHS, Arch
from warpattn.problem.launch import DEFAULT_OPTIONS, Choice, Launch, PlanOptions
from warpattn.problem.operands import Operands
from warpattn.sequences import PagedKV, PagedRagged, Ragged, Sequence

from . import paged_ragged
from .decode import choice as decode
from .decode import launch as decode_launch
from .mla import config as mla
from .mla import launch as mla_launch
from .prefill import launch as prefill
from .prefill.choice import choose as dense_choice
from .prefill_varlen import launch as prefill_varlen
from .prefill_varlen.config import choose as varlen_choice


def list_launches(checked: CheckedCall, x: Operands, sequence: Sequence, options: PlanOptions) -> tuple[Launch, ...]:
    """One launch of dense prefill, two of ragged batches and paged caches, one more for values of more than 256 columns
    and one more where keys are split; one or two of decode; those of prefill and of decode for ragged queries over
    pages."""
    problem = checked.problem
    if isinstance(sequence, PagedRagged):
        return paged_ragged.list_launches(checked, x, sequence, options)
    if _decodes(problem):
        launches = mla_launch.list_launches if is_latent(problem) else decode_launch.list_launches
        return launches(checked, x, sequence, choose(problem, ARCHS["sm90"], options))
    if isinstance(sequence, Ragged | PagedKV):
        return prefill_varlen.list_launches(checked, x, sequence, choose(problem, ARCHS["sm90"], options))
    return prefill.list_launches(checked, x, choose(problem, ARCHS["sm90"], options), sequence)


def choose(problem: Problem, target: Arch, options: PlanOptions = DEFAULT_OPTIONS) -> Choice:
    """Which kernel a problem gets."""
    if problem.kind == "paged-ragged":
        return paged_ragged.choose(problem, target, options)
    if _decodes(problem):
        return (mla if is_latent(problem) else decode).choose(problem, target, options=options)
    return (dense_choice if problem.kind == "dense" else varlen_choice)(problem, target, options)


def _decodes(problem: Problem) -> bool:
    """Whether decode is the kernel of a problem; the number of query tokens alone settles it for prefill."""
    return problem.seq_q <= decode.MAX_TOKENS and decode.serves(problem)
