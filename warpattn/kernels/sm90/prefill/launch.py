"""The launch of dense prefill on Hopper, with every argument by name."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from warpattn.problem import CheckedCall, Problem
from warpattn.problem.arch import compile_options
from warpattn.problem.launch import Choice, Launch
from warpattn.problem.operands import Features, Operands, is_masked, modifier_args, sees_first_keys
from warpattn.problem.scales import call_scales
from warpattn.sequences import Sequence

from ...nvidia.combine_launch import combine_launch, workspace
from ..arguments import PrefillShape, SplitShape
from ..large_scores import programs
from ..widths import value_blocks
from .config import SM90Config, pad_dim
from .eight_bit.transpose_launch import transposed
from .eight_bit.widen_launch import widened

OPTIONS = compile_options()
LONG_ROWS = 16384  # keys from which on rows of a triangle are long, see `SM90Config.shares_code`


def list_launches(
    checked: CheckedCall, x: Operands, sequence: Sequence, choice: Choice
) -> tuple[Launch, ...]:
    """The launch of a dense call, after one that transposes 8-bit values if queries have 8 bits or one that makes 16-bit
    copies of keys and values, and before one that combines parts if keys are split."""
    problem = checked.problem
    before: tuple[Launch, ...] = ()
    if choice.config.products:
        across, before = transposed(x.v)
        x = x._replace(v=across)
    elif choice.config.widened:
        x, _, copying = widened(x, sequence)
        before = (copying,)
    firsts = value_blocks(problem.dim_v)
    if choice.partitions == 1:
        return *before, *(attention_launch(checked, x, sequence, choice, first) for first in firsts)
    parts = workspace(problem, choice.partitions, pad_dim(firsts[-1] + choice.config.padded_v), x.q)
    to_parts = x._replace(out=parts.o, lse=parts.denominators)
    blocks = [attention_launch(checked, to_parts, sequence, choice, first) for first in firsts]
    return *before, *blocks, combine_launch("sm90", checked, x, choice.partitions, parts)


def attention_launch(
    checked: CheckedCall, x: Operands, sequence: Sequence, choice: Choice, first_value: int = 0
) -> Launch:
    """The launch of the attention kernel for values from column `first_value` on; where keys are split, out and lse of
    `x` are the workspace's."""
    problem, config = checked.problem, choice.config.from_value(first_value)
    scale = checked.scale if config.eight_bit is None else call_scales(checked.scale, x, sequence)
    args = {
        "q_maps": (x.q,) * len(config.qk_parts), "k_maps": (x.k,) * len(config.qk_parts),
        "v_maps": (x.v,) * len(config.v_parts), "o_maps": (x.out,) * len(config.store_parts),
        "lse_ptr": x.lse, "sinks_ptr": x.sinks,
        "counter_ptr": torch.zeros(1, dtype=torch.int32), "scale": scale,
        "shape": _shape(problem, choice),
        **modifier_args(checked),
    }  # fmt: skip
    has_lse = (problem.has_lse or config.split) and not first_value
    features = Features(*programs(checked), problem.has_sinks and not config.split, has_lse, split_keys=True)

    def source():
        from .signature import prefill_source  # imports Triton

        return prefill_source(args, config, features)

    shared = config.shares_code(is_masked(problem), sees_first_keys(problem) and problem.seq_k >= LONG_ROWS)
    return Launch(
        "sm90.prefill", "sm90", (config, features.key, shared), source, options(config), choice.grid, args,
        persistent=True, pdl=True, tile_counter="counter_ptr", l2_promotion=256, shared_code=shared,
    )  # fmt: skip


@lru_cache(256)
def options(config: SM90Config) -> dict[str, Any]:
    """Options of triton.compile."""
    return compile_options(maxnreg=config.max_registers) if config.ctas > 1 else OPTIONS


def _shape(problem: Problem, choice: Choice) -> PrefillShape | SplitShape:
    p, order = problem, choice.order
    group = p.heads_q // p.heads_kv
    shape = PrefillShape(p.seq_q, p.seq_k, p.heads_q, group, order.m_tiles, order.heads, order.section)
    return SplitShape(*shape, problem.batch, choice.partitions) if choice.config.split else shape
