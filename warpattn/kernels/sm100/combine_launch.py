"""What a split of the keys needs beside its prefill launch: a workspace of parts, and the launch that combines them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpattn.problem import CheckedCall, Problem
from warpattn.problem.arch import compile_options
from warpattn.problem.launch import Choice, Launch
from warpattn.problem.operands import Operands, run_strides

from .config import FA4Config

OPTIONS = compile_options()


class Parts(NamedTuple):
    """Outputs (parts * batch, queries, heads, padded dim) and base-2 LSE (parts * batch, queries, heads), fp32."""

    o: Tensor
    lse: Tensor


def workspace(problem: Problem, choice: Choice, x: Operands) -> Parts:
    """Room for the parts, not initialised."""
    config: FA4Config = choice.config
    rows = (choice.partitions * problem.batch, problem.seq_q, problem.heads_q)
    o = torch.empty(*rows, config.padded_ov_depth, dtype=torch.float32, device=x.q.device)
    return Parts(o, torch.empty(*rows, dtype=torch.float32, device=x.q.device))


def combine_launch(checked: CheckedCall, x: Operands, choice: Choice, parts: Parts) -> Launch:
    """The launch that combines the parts."""
    p, config = checked.problem, choice.config
    rows = p.batch * p.seq_q * p.heads_q
    args = {
        "o_ptr": parts.o, "partial_lse_ptr": parts.lse, "out": (x.out, *run_strides(x.out)), "lse_ptr": x.lse,
        "sinks_ptr": x.sinks, "shape": (rows, p.seq_q, p.heads_q, p.dim_v),
    }  # fmt: skip

    def source() -> Any:
        from .combine import combine_source  # imports Triton

        return combine_source(config, p.has_sinks, p.has_lse)

    key = (config, p.has_sinks, p.has_lse)
    grid = (-(-rows // rows_per_program(config.padded_ov_depth)),)
    return Launch("sm100.combine", "sm100", key, source, OPTIONS, grid, args)


def rows_per_program(cols: int) -> int:
    """Rows that a program of the combination takes: four warps, a lane for four columns."""
    return 4 * (32 // min(32, cols // 4))
