"""Which Hopper kernel a problem gets, and the launches of a call."""

from __future__ import annotations

from warpattn.problem import CheckedCall, Problem
from warpattn.problem.arch import ARCHS, Arch
from warpattn.problem.launch import Choice, Launch, PlanOptions
from warpattn.problem.operands import Operands
from warpattn.sequences import PagedKV, Ragged, Sequence

from .decode import launch as decode
from .prefill import launch as prefill
from .prefill.config import choose as dense_choice
from .prefill_varlen import launch as prefill_varlen
from .prefill_varlen.config import choose as varlen_choice


def list_launches(checked: CheckedCall, x: Operands, sequence: Sequence, options: PlanOptions) -> tuple[Launch, ...]:
    """One launch of dense prefill; two of prefill of ragged batches and paged caches; one or two of decode. Prefill
    never splits keys, so it is batch-invariant."""
    if decode.serves(checked.problem):
        choice = decode.choose(checked.problem, ARCHS["sm90"], options=options)
        return decode.list_launches(checked, x, sequence, choice)
    if isinstance(sequence, Ragged | PagedKV):
        return prefill_varlen.list_launches(checked, x, sequence)
    return prefill.list_launches(checked, x)


def choose(problem: Problem, target: Arch) -> Choice:
    """Which kernel a problem gets."""
    if decode.serves(problem):
        return decode.choose(problem, target)
    return (dense_choice if problem.kind == "dense" else varlen_choice)(problem, target)
