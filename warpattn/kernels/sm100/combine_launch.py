"""What a split of the keys needs beside its prefill launch: a workspace of parts, and the launch that combines them."""

from __future__ import annotations

from typing import Any

from warpattn.problem import CheckedCall, Problem
from warpattn.problem.arch import compile_options
from warpattn.problem.launch import Choice, Launch
from warpattn.problem.operands import Operands, run_strides

from ..pieces.combine_config import CombineTile, Parts, allocate_parts
from .sequence_args import CombineShape, StridedArgs

OPTIONS = compile_options()


def workspace(problem: Problem, choice: Choice, x: Operands) -> Parts:
    """Memory for parts of (parts * batch, queries, heads) rows."""
    rows = (choice.partitions * problem.batch, problem.seq_q, problem.heads_q)
    return allocate_parts(rows, choice.config.padded_ov_depth, x.q.device)


def combine_launch(checked: CheckedCall, x: Operands, choice: Choice, parts: Parts) -> Launch:
    """The launch that combines the parts."""
    p, config = checked.problem, choice.config
    rows = p.batch * p.seq_q * p.heads_q
    args = {
        "o_ptr": parts.o, "partial_lse_ptr": parts.lse, "out": StridedArgs(x.out, *run_strides(x.out)),
        "lse_ptr": x.lse, "sinks_ptr": x.sinks, "shape": CombineShape(rows, p.seq_q, p.heads_q, p.dim_v),
    }  # fmt: skip

    def source() -> Any:
        from .combine import combine_source  # imports Triton

        return combine_source(config, p.has_sinks, p.has_lse)

    key = (config, p.has_sinks, p.has_lse)
    grid = (-(-rows // CombineTile(config.padded_ov_depth).rows),)
    return Launch("sm100.combine", "sm100", key, source, OPTIONS, grid, args)
