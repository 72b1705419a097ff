"""Decides when Hopper's prefill reads copies of K and V, for its planner. This file imports no Triton."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from warpattn.problem import Problem
from warpattn.problem.launch import Choice, PlanOptions
from warpattn.problem.operands import is_masked, sees_first_keys
from warpattn.problem.problem import NO_SCALES, Scales
from warpattn.problem.scales import EightBit
from warpattn.quantized import ROW_BLOCKS

from ..arguments import COPIED_KEYS
from ..operand_format import OperandFormat

LATER = (None, "tensor", "head")  # scales that prefill folds into the softmax scale and the factor of the output
# With so many query rows per key, copies of 8-bit keys and of keys in small pages pay off (bench/notes.md, 236).
CONVERTED_ROWS, PAGED_ROWS = 1024, 4096
MOST_COLUMNS = 128  # columns copied at a time: 64 registers a thread in 16 bits
MOST_BYTES = 512 * 2**20  # size limit of all copies
WHY = "enough rows of queries see each key: keys and values are copied once, before, in 16 bits and in whole tiles"


def copies(problem: Problem, options: PlanOptions) -> bool:
    """Whether K and V are copied before prefill: 8-bit ones, which each query tile would convert again, and small
    pages. Not for batch-invariant results: the other sequences must not decide what a row reads."""
    small = 0 < problem.page_size < COPIED_KEYS
    if not options.copies or options.batch_invariant or problem.q_dtype is not None or problem.rope:
        return False
    if not sees_first_keys(problem):
        return False
    if problem.kv_dtype is None:
        return small and seeing_rows(problem) >= PAGED_ROWS and copied_bytes(problem) <= MOST_BYTES
    if problem.dtype != torch.bfloat16 and any(map(of_token, problem.scales)):
        return False  # a token's scale may exceed fp16
    return seeing_rows(problem) >= CONVERTED_ROWS and copied_bytes(problem) <= MOST_BYTES


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


def _lines(choice: Choice, problem: Problem) -> tuple[str, ...]:
    most = "up to " if problem.page_size else ""
    return *choice.lines(), f"sm90.copy before it: {most}{copied_bytes(problem):,} bytes of keys and values in 16 bits"
