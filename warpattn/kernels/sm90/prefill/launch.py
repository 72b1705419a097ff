"""The launch of dense prefill on Hopper, with every argument by name."""

from __future__ import annotations

import torch

from warpattn.problem import CheckedCall, Problem
from warpattn.problem.arch import ARCHS, compile_options
from warpattn.problem.launch import Choice, Launch
from warpattn.problem.operands import Operands, modifier_args, programs

from .config import PrefillShape, SM90Config, choose

OPTIONS = compile_options()


def list_launches(checked: CheckedCall, x: Operands, choice: Choice | None = None) -> tuple[Launch, ...]:
    """The one launch of a dense call, with the planner's choice or a given one."""
    problem = checked.problem
    choice = choose(problem, ARCHS["sm90"]) if choice is None else choice
    config: SM90Config = choice.config
    mask, score = programs(checked)
    args = {
        "q_maps": (x.q,) * len(config.qk_parts), "k_maps": (x.k,) * len(config.qk_parts),
        "v_maps": (x.v,) * len(config.v_parts), "o_maps": (x.out,) * len(config.store_parts),
        "lse_ptr": x.lse, "sinks_ptr": x.sinks,
        "counter_ptr": torch.zeros(1, dtype=torch.int32), "scale": checked.scale, "shape": _shape(problem, choice),
        **modifier_args(checked),
    }  # fmt: skip

    def source():
        from .signature import prefill_source  # imports Triton

        return prefill_source(config, mask, score, problem.has_sinks, problem.has_lse)

    key = (config, mask.key, None if score is None else score.key, problem.has_sinks, problem.has_lse)
    launch = Launch(
        "sm90.prefill", "sm90", key, source, OPTIONS, choice.grid, args,
        persistent=True, tile_counter="counter_ptr", l2_promotion=256,
    )  # fmt: skip
    return (launch,)


def _shape(problem: Problem, choice: Choice) -> PrefillShape:
    order, group = choice.order, problem.heads_q // problem.heads_kv
    return PrefillShape(problem.seq_q, problem.seq_k, problem.heads_q, group, order.m_tiles, order.heads, order.section)
