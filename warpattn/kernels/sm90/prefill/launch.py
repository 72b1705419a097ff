"""The launch of dense prefill on Hopper, with every argument by name."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from warpattn.language.nodes import Program
from warpattn.problem import CheckedCall, Problem
from warpattn.problem.arch import compile_options
from warpattn.problem.launch import Choice, Launch
from warpattn.problem.operands import Operands, modifier_args, programs


@dataclass(frozen=True)
class Shape:
    """The integers of a launch, in the order of the kernel's `shape` argument."""

    seq_q: int
    seq_k: int
    heads_q: int
    group: int
    m_tiles: int
    heads: int
    section: int

    def values(self) -> tuple[int, ...]:
        return (self.seq_q, self.seq_k, self.heads_q, self.group, self.m_tiles, self.heads, self.section)


def prefill(checked: CheckedCall, x: Operands, choice: Choice) -> Launch:
    """The launch of the prefill kernel of a choice."""
    problem = checked.problem
    args = {
        "q_desc": x.q, "k_desc": x.k, "v_desc": x.v, "o_desc": x.out, "lse_ptr": x.lse, "sinks_ptr": x.sinks,
        "counter_ptr": torch.zeros(1, dtype=torch.int32), "scale": checked.scale,
        "shape": shape_of(problem, choice).values(), **modifier_args(checked),
    }  # fmt: skip
    return replace(prefill_code(problem, choice, *programs(checked)), args=args)


def prefill_code(problem: Problem, choice: Choice, mask: Program, score: Program | None) -> Launch:
    """The launch without its arguments: what is needed to compile the kernel."""

    def source():
        from .signature import prefill_source  # imports Triton

        return prefill_source(choice.config, mask, score, problem.has_sinks, problem.has_lse)

    key = (choice.config, mask.key, None if score is None else score.key, problem.has_sinks, problem.has_lse)
    return Launch(
        "sm90.prefill", "sm90", key, source, compile_options(), choice.grid, {},
        persistent=True, tile_counter="counter_ptr", l2_promotion=256,
    )  # fmt: skip


def shape_of(problem: Problem, choice: Choice) -> Shape:
    """The kernel's integers."""
    order = choice.order
    group = problem.heads_q // problem.heads_kv
    return Shape(problem.seq_q, problem.seq_k, problem.heads_q, group, order.m_tiles, order.heads, order.section)
