"""The launch of Blackwell's prefill kernels, with arguments by name."""

from __future__ import annotations

from typing import Any

from warpattn.problem import CheckedCall, Problem
from warpattn.problem.launch import Choice, Launch
from warpattn.problem.operands import Operands, modifier_args, programs
from warpattn.problem.scales import call_scales
from warpattn.sequences import PagedRagged, Ragged, Sequence

from .config import FA4Config
from .sequence_args import Shape, recompute_args, sequence_args
from .traits import Traits


def prefill_launch(checked: CheckedCall, x: Operands, sequence: Sequence, choice: Choice, traits: Traits) -> Launch:
    """The launch of the kernel of a choice; its grid counts clusters."""
    problem = checked.problem
    config: FA4Config = choice.config
    mask, score = programs(checked)
    tiles = max(1, -(-longest_queries(problem, sequence) // config.PairBM_eff))
    scale = checked.scale if config.eight_bit is None else call_scales(checked.scale, x, sequence)
    args = sequence_args(x, sequence, config) | {
        "lse_ptr": x.lse, "sinks_ptr": x.sinks, "scale": scale,
        "shape": Shape(problem.seq_q, problem.seq_k, problem.heads_q, tiles),
        "recompute_args": recompute_args(mask.outputs[0], x, config), **modifier_args(checked),
    }  # fmt: skip

    def source() -> Any:
        from .signature import prefill_source  # imports Triton

        return prefill_source(args, config, traits, mask, score)

    key = (config, traits, mask.key, None if score is None else score.key)
    grid = (tiles * choice.partitions, *choice.grid[1:])
    return Launch(f"sm100.{choice.kernel}", "sm100", key, source, config.options, grid, args)


def longest_queries(problem: Problem, sequence: Sequence) -> int:
    """An upper bound of a sequence's queries, found without reading from a GPU."""
    if not isinstance(sequence, Ragged | PagedRagged):
        return problem.seq_q
    if sequence.max_q is not None:
        return sequence.max_q
    if sequence.cu_q.device.type == "cpu":
        return int(sequence.cu_q.diff().max())
    return problem.longest_q
