"""Decides when Hopper's prefill reads copies of K and V, for its planner. This file imports no Triton."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from warpattn.problem import Problem
from warpattn.problem.launch import Choice, PlanOptions
from warpattn.problem.memory import COPIED_BYTES, COPIED_KEYS
from warpattn.problem.operands import is_masked, sees_first_keys
from warpattn.problem.problem import NO_SCALES, Scales
from warpattn.problem.scales import EightBit
from warpattn.quantized import ROW_BLOCKS

from ..operand_format import OperandFormat

LATER = (None, "tensor", "head")  # scales that prefill folds into the softmax scale and the factor of the output
# With so many query rows per key, copies pay off: of 8-bit keys, of those with a scale for each token, which take
# longest to convert, and of 16-bit keys in small pages (bench/notes.md, 236 and 248).
CONVERTED_ROWS, SCALED_ROWS, PAGED_ROWS = 1024, 512, 4096
MOST_COLUMNS = 128  # columns copied at a time: 64 registers a thread in 16 bits
WHY = "enough rows of queries see each key: keys and values are copied once, before, in 16 bits and in whole tiles"


def copies(problem: Problem, options: PlanOptions) -> bool:
    """Whether K and V are copied before prefill: 8-bit ones, which each query tile would convert again, and small
    pages. Not for batch-invariant results: the other sequences must not decide what a row reads."""
    return _pays(problem, options) and copied_bytes(problem) <= COPIED_BYTES


def workspace_bytes(problem: Problem, options: PlanOptions) -> int:
    """Bytes of the workspace for copies of the keys of a step's long prompts (copies/places.py); 0 if there are none.
    The workspace is the caller's. Without it a call has one of its own, if copies pay off in the mean."""
    place = bytes_of_place(problem)
    if options.workspace is None:
        size = min(place * places(problem), COPIED_BYTES) if _pays(problem, options) else 0
    else:
        size = options.workspace.nbytes if may_copy(problem, options) and _may_pay(problem) else 0
    return size if size >= place else 0


def _may_pay(problem: Problem) -> bool:
    """Whether enough queries of some sequence of a step could see each key: the rule of copies/places.py for the
    longest prompt over a full cache."""
    queries, least = min(problem.seq_q, problem.max_q or problem.seq_q), least_queries(problem)
    keys = max(queries, problem.seq_k)
    return queries * (2 * keys - queries) >= 2 * keys * least if is_masked(problem) else queries >= least


def _pays(problem: Problem, options: PlanOptions) -> bool:
    """Whether a call may make copies, and enough rows see each key in the mean."""
    return options.copies and may_copy(problem, options) and seeing_rows(problem) >= least_rows(problem)


def places(problem: Problem) -> int:
    """Places of COPIED_KEYS that hold all keys of a batch over pages."""
    return problem.batch * -(-problem.seq_k // COPIED_KEYS)


def may_copy(problem: Problem, options: PlanOptions) -> bool:
    """Whether a call may read copies of its keys and values, and would gain if enough rows see each key."""
    if options.batch_invariant or problem.q_dtype is not None or problem.rope or not sees_first_keys(problem):
        return False
    if problem.kv_dtype is None:
        return 0 < problem.page_size < COPIED_KEYS
    return problem.dtype == torch.bfloat16 or not has_token_scales(problem)  # these may exceed fp16


def has_token_scales(problem: Problem) -> bool:
    return any(map(of_token, problem.scales))


def least_rows(problem: Problem) -> int:
    """Rows of queries that must see each key."""
    if problem.kv_dtype is None:
        return PAGED_ROWS
    return SCALED_ROWS if has_token_scales(problem) else CONVERTED_ROWS


def least_queries(problem: Problem) -> int:
    """Queries of a sequence that must see each key."""
    return -(-least_rows(problem) * problem.heads_kv // problem.heads_q)


def bytes_of_place(problem: Problem) -> int:
    """Bytes of the copies of COPIED_KEYS keys and values of all heads."""
    return 2 * COPIED_KEYS * problem.heads_kv * (problem.dim_qk + problem.dim_v)


def of_token(scale: str | int | None) -> bool:
    """Whether scales of this kind belong to tokens; copies are already multiplied by them."""
    return scale not in LATER


@dataclass(frozen=True)
class CopiedRows:
    """Compile-time description of the K or V rows that the kernel copies."""

    cols: int  # head dim rounded up to a power of two
    paged: bool
    scaled: bool = False  # multiplied by scales of tokens
    columns: int = 0  # columns that share a scale; 0: all
    shared: int = 1  # tokens that share a scale

    @property
    def width(self) -> int:
        """Columns copied at a time: those of a scale, or what registers hold."""
        return self.columns or min(self.cols, MOST_COLUMNS)


def copied_rows(dim: int, paged: bool, scale: str | int | None) -> CopiedRows:
    """The `CopiedRows` of a head dim with a scale of this kind."""
    cols = max(16, 1 << (dim - 1).bit_length())
    columns = scale if isinstance(scale, int) else 0
    return CopiedRows(cols, paged, of_token(scale), columns, ROW_BLOCKS.get(scale, 1) if isinstance(scale, str) else 1)


def seeing_rows(problem: Problem) -> float:
    """Approximate number of query rows that see each key, at mean length."""
    several = problem.batch if problem.ragged_queries else 1
    queries = problem.seq_q / max(several, 1)
    keys = problem.seq_k / several if problem.kind == "ragged" else problem.seq_k
    seen = 1 - queries / (2 * max(keys, queries, 1)) if is_masked(problem) else 1.0
    return queries * seen * problem.heads_q / problem.heads_kv


def copied_bytes(problem: Problem) -> int:
    """Bytes of the copies if every sequence has its maximum length."""
    keys = problem.seq_k * (1 if problem.kind == "ragged" else problem.batch)
    return 2 * keys * problem.heads_kv * (problem.dim_qk + problem.dim_v)


def of_copies(problem: Problem) -> Problem:
    """The problem over the copies, without scales."""
    page_size = COPIED_KEYS if problem.page_size else 0
    return replace(problem, kv_dtype=None, scales=NO_SCALES, page_size=page_size)


def with_scales(operands: OperandFormat, problem: Problem) -> OperandFormat:
    """The operands of a kernel over copies of a problem's 8-bit K and V; scales of tensor or head are left to it."""
    if problem.kv_dtype is None:
        return operands
    left = Scales(*(None if of_token(scale) else scale for scale in problem.scales))
    return replace(operands, eight_bit=EightBit(operands.element, left))


def over_copies(choice: Choice, config: Any, problem: Problem) -> Choice:
    """`choice` of `of_copies(problem)`, with `config`, and lines about copies."""
    return replace(choice, config=config, lines=partial(_lines, choice, problem), reasons=(*choice.reasons, WHY))


def over_workspace(choice: Choice, config: Any, problem: Problem, size: int) -> Choice:
    """`choice` for the long prompts of a step, with `config`, and lines about the workspace of `size` bytes."""
    keys = size // bytes_of_place(problem) * COPIED_KEYS
    line = f"sm90.copy_places before it: up to {keys:,} keys and values in 16 bits, in a workspace of {size:,} bytes"
    why = f"keys that {least_queries(problem)} queries of a sequence see are copied before, if the workspace holds them"
    return replace(choice, config=config, lines=lambda: (*choice.lines(), line), reasons=(*choice.reasons, why))


def _lines(choice: Choice, problem: Problem) -> tuple[str, ...]:
    most = "up to " if problem.page_size else ""
    return *choice.lines(), f"sm90.copy before it: {most}{copied_bytes(problem):,} bytes of keys and values in 16 bits"
