"""When prefill on Hopper reads copies of keys and values. Nothing in this file imports Triton."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from warpattn.problem import Problem
from warpattn.problem.launch import Choice, PlanOptions
from warpattn.problem.operands import is_masked, sees_first_keys
from warpattn.problem.problem import NO_SCALES
from warpattn.quantized import ROW_BLOCKS

from ..arguments import COPIED_KEYS

LATER = (None, "tensor", "head")  # scales that join the softmax scale and the output's factor
# Rows of queries that see a key, from which on copies take less time (bench/notes.md 236): of 8 bits, of small pages.
CONVERTED_ROWS, PAGED_ROWS = 1024, 4096
MOST_COLUMNS = 128  # of a step: 64 registers a thread in 16 bits
MOST_BYTES = 512 * 2**20  # of the copies
WHY = "enough rows of queries see each key: keys and values are copied once, before, in 16 bits and in whole tiles"


def copies(problem: Problem, options: PlanOptions) -> bool:
    """Whether keys and values are copied before prefill: those of 8 bits, which would be converted in each tile, and
    those of small pages. What a batch-invariant row reads must not depend on the other sequences."""
    small = 0 < problem.page_size < COPIED_KEYS
    if not options.copies or options.batch_invariant or problem.q_dtype is not None or problem.rope:
        return False
    if not sees_first_keys(problem):
        return False
    if problem.kv_dtype is None:
        return small and seeing_rows(problem) >= PAGED_ROWS and copied_bytes(problem) <= MOST_BYTES
    if problem.dtype != torch.bfloat16 and any(map(of_token, problem.scales)):
        return False  # a factor of a token may exceed fp16
    return seeing_rows(problem) >= CONVERTED_ROWS and copied_bytes(problem) <= MOST_BYTES


def of_token(scale: str | int | None) -> bool:
    """Whether scales of this kind are factors of tokens, which copies have in them."""
    return scale not in LATER


@dataclass(frozen=True)
class CopiedRows:
    """Rows of keys or of values, as the kernel copies them."""

    cols: int  # a power of two from the head dim on
    paged: bool
    scaled: bool = False  # by factors of tokens
    columns: int = 0  # that share a factor; 0: all
    shared: int = 1  # tokens that share them

    @property
    def width(self) -> int:
        """Columns of a step: at most what registers hold."""
        return self.columns or min(self.cols, MOST_COLUMNS)


def copied_rows(dim: int, paged: bool, scale: str | int | None) -> CopiedRows:
    """Those of a head dim, with a scale of this kind."""
    cols = max(16, 1 << (dim - 1).bit_length())
    columns = scale if isinstance(scale, int) else 0
    return CopiedRows(cols, paged, of_token(scale), columns, ROW_BLOCKS.get(scale, 1) if isinstance(scale, str) else 1)


def seeing_rows(problem: Problem) -> float:
    """Rows of queries that see a key, about, in a sequence of the mean length."""
    several = problem.batch if problem.ragged_queries else 1
    queries = problem.seq_q / max(several, 1)
    keys = problem.seq_k / several if problem.kind == "ragged" else problem.seq_k
    seen = 1 - queries / (2 * max(keys, queries, 1)) if is_masked(problem) else 1.0
    return queries * seen * problem.heads_q / problem.heads_kv


def copied_bytes(problem: Problem) -> int:
    """Of the copies of all keys and values that there may be."""
    keys = problem.seq_k * (1 if problem.kind == "ragged" else problem.batch)
    return 2 * keys * problem.heads_kv * (problem.dim_qk + problem.dim_v)


def of_copies(problem: Problem) -> Problem:
    """The problem over the copies, without scales."""
    page_size = COPIED_KEYS if problem.page_size else 0
    return replace(problem, kv_dtype=None, scales=NO_SCALES, page_size=page_size)


def over_copies(choice: Choice, config: Any, problem: Problem) -> Choice:
    """The choice of `of_copies` with another configuration, and what it says of the copies."""
    return replace(choice, config=config, lines=partial(_lines, choice, problem), reasons=(*choice.reasons, WHY))


def _lines(choice: Choice, problem: Problem) -> tuple[str, ...]:
    most = "up to " if problem.page_size else ""
    return *choice.lines(), f"sm90.copy before it: {most}{copied_bytes(problem):,} bytes of keys and values in 16 bits"
