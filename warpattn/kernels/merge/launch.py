"""The launch that merges results over parts of the keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from warpattn.kernels.cache.config import Rows, rows_of_program
from warpattn.kernels.cache.launch import run_of
from warpattn.problem.arch import compile_options
from warpattn.problem.element import element_of
from warpattn.problem.launch import Launch

from .config import MergeConfig, MergeShape, State


class Result(NamedTuple):
    """Attention over some keys: out (B, Sq, Hq, Dv) with lse (B, Hq, Sq), or (total_q, Hq, Dv) with (Hq, total_q)."""

    out: Tensor
    lse: Tensor


def merge_launches(
    arch: str, results: Sequence[Result], merged: Result, limit: Tensor | None = None
) -> tuple[Launch, ...]:
    """One launch on an architecture; the last stride of all outputs is 1, lse is fp32. limit: int32 of one element, how
    many rows of (total_q, …) count; the others are not written."""
    *_, tokens, heads, dim = merged.out.shape
    element = element_of(merged.out.dtype)
    rows = rows_of_program((dim,), element.bytes)
    run = run_of([merged.out, *(result.out for result in results)], element.bytes)
    config = MergeConfig(len(results), dim, rows, run, limit is not None)
    count = merged.out.numel() // dim
    args = {
        "states": tuple(state_of(result, run) for result in results),
        "merged": state_of(merged, run),
        "limit": limit,
        "shape": MergeShape(count, tokens, heads),
    }

    def source():
        from .signature import merge_source  # imports Triton

        return merge_source(args, config, arch)

    key = (element.name, config)
    return (Launch(f"{arch}.merge", arch, key, source, compile_options(), (-(-count // rows),), args),)


def state_of(result: Result, run: int) -> State:
    """Pointers and strides; (total_q, …) is one sequence."""
    out, lse = (x if x.ndim == full else x[None] for x, full in zip(result, (4, 3), strict=True))
    lse_outer, lse_head, lse_row = lse.stride()
    at = [stride // run for stride in out.stride()[:-1]]
    return State(Rows(result.out, *at), Rows(result.lse, lse_outer, lse_row, lse_head))
