"""Which Hopper kernel a problem gets, and the launches of a call."""

from __future__ import annotations

from warpattn.problem import Problem, Ready
from warpattn.problem.arch import ARCHS, Arch
from warpattn.problem.operands import Operands
from warpattn.problem.step import Choice, Step, Terms
from warpattn.sequences import PagedKV, Ragged, Sequence

from .decode import launch as decode
from .prefill.config import choose as dense_choice
from .prefill.launch import prefill
from .prefill_varlen import launch as prefill_varlen
from .prefill_varlen.config import choose as varlen_choice


def steps_on(ready: Ready, x: Operands, sequence: Sequence, terms: Terms) -> tuple[Step, ...]:
    """One launch of decode or of prefill; two for prefill of ragged batches and paged caches, see its steps. Prefill
    never splits keys, so it is batch-invariant."""
    if decode.serves(ready.problem):
        choice = decode.choose(ready.problem, ARCHS["sm90"], terms=terms)
        return decode.steps(ready, x, sequence, choice)
    if isinstance(sequence, Ragged | PagedKV):
        return prefill_varlen.steps(ready, x, sequence)
    return (prefill(ready, x, dense_choice(ready.problem, ARCHS["sm90"])),)


def choose(problem: Problem, target: Arch) -> Choice:
    """Which kernel a problem gets."""
    if decode.serves(problem):
        return decode.choose(problem, target)
    return (dense_choice if problem.kind == "dense" else varlen_choice)(problem, target)
