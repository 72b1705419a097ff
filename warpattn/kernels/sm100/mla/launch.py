"""The launches of latent attention on Blackwell: the decode kernel and, where keys are split, the combination."""

from __future__ import annotations

from typing import Any

from warpattn.problem import CheckedCall
from warpattn.problem.arch import compile_options
from warpattn.problem.launch import Choice, Launch
from warpattn.problem.operands import Operands, modifier_args, programs, run_strides

from ...nvidia.combine_args import StridedArgs
from ...nvidia.combine_launch import combine_launch, workspace
from ..sequence_args import Lengths
from ..traits import Traits
from .config import LatentConfig

OPTIONS = compile_options()


def latent_launches(checked: CheckedCall, x: Operands, keys: dict[str, Any], choice: Choice) -> tuple[Launch, ...]:
    """The launches of a choice; `keys`: what `sequence_args.key_args` gives."""
    problem = checked.problem
    group = problem.heads_q // problem.heads_kv
    if choice.partitions == 1:
        traits = Traits(problem.kind, group, problem.has_sinks, problem.has_lse)
        return (_launch(checked, x, keys, choice, traits),)
    parts = workspace(problem, choice.partitions, choice.config.padded_ov_depth, x.q)
    first = _launch(checked, x._replace(out=parts.o, lse=parts.lse.transpose(1, 2)), keys, choice, Traits(
        problem.kind, group, has_sinks=False, has_lse=True
    ))  # fmt: skip
    return first, combine_launch("sm100", checked, x, choice.partitions, parts)


def _launch(checked: CheckedCall, x: Operands, keys: dict[str, Any], choice: Choice, traits: Traits) -> Launch:
    problem, config = checked.problem, choice.config
    mask, score = programs(checked)
    lse = (0, 0, 0) if x.lse is None else (x.lse.stride(0), x.lse.stride(2), x.lse.stride(1))
    args = keys | {
        "q": StridedArgs(x.q, *run_strides(x.q)), "out": StridedArgs(x.out, *run_strides(x.out)),
        "lse": StridedArgs(x.lse, *lse), "sinks_ptr": x.sinks, "scale": checked.scale,
        "shape": Lengths(problem.seq_q, problem.seq_k), **modifier_args(checked),
    }  # fmt: skip

    def source() -> Any:
        from .signature import latent_source  # imports Triton

        return latent_source(config, traits, mask, score)

    key = (config, traits, mask.key, None if score is None else score.key)
    return Launch("sm100.mla", "sm100", key, source, OPTIONS, choice.grid, args)


def key_box(config: LatentConfig) -> tuple[int, int, int]:
    """(rows, rotary columns, latent columns) of what one copy reads."""
    return config.box_rows, config.rope, config.half
