"""The launches of latent attention on Blackwell: the decode kernel and, where keys are split, the combination."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from warpattn.problem import CheckedCall
from warpattn.problem.launch import Choice, Launch
from warpattn.problem.operands import Operands, captured, flat, programs

from ..combine_launch import combine_launch, workspace
from ..traits import Traits
from .config import LatentConfig

OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


def latent_launches(checked: CheckedCall, x: Operands, keys: dict[str, Any], choice: Choice) -> tuple[Launch, ...]:
    """The launches of a choice; `keys`: what `steps.key_places` says."""
    problem = checked.problem
    group = problem.heads_q // problem.heads_kv
    if choice.partitions == 1:
        traits = Traits(problem.kind, group, problem.has_sinks, problem.has_lse)
        return (_launch(checked, x, keys, choice, traits),)
    parts = workspace(problem, choice, x)
    first = _launch(checked, x._replace(out=parts.o, lse=parts.lse.transpose(1, 2)), keys, choice, Traits(
        problem.kind, group, has_sinks=False, has_lse=True
    ))  # fmt: skip
    return first, combine_launch(checked, x, choice, parts)


def _launch(checked: CheckedCall, x: Operands, keys: dict[str, Any], choice: Choice, traits: Traits) -> Launch:
    problem, config = checked.problem, choice.config
    mask, score = programs(checked)
    tensors = tuple(tensor.detach() for tensor in captured(checked))
    count = len(checked.mask.tensors)
    lse = (None, 0, 0, 0) if x.lse is None else (x.lse, x.lse.stride(0), x.lse.stride(2), x.lse.stride(1))
    args = keys | {
        "q": _strided(x.q), "out": _strided(x.out), "lse": lse, "sinks_ptr": x.sinks, "scale": checked.scale,
        "shape": (problem.seq_q, problem.seq_k),
        "mask_args": flat(tensors[:count]), "score_args": flat(tensors[count:]),
    }  # fmt: skip

    def source() -> Any:
        from .signature import latent_source  # imports Triton

        return latent_source(config, traits, mask, score)

    key = (config, traits, mask.key, None if score is None else score.key)
    return Launch("sm100.mla", "sm100", key, source, OPTIONS, choice.grid, args)


def _strided(x: Tensor) -> tuple[Tensor, int, int, int]:
    """Pointer and strides of batch, token and head in units of 8 elements; those of single entries are 0."""
    strides = [stride // 8 if size > 1 else 0 for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True)]
    return (x, *strides)


def key_box(config: LatentConfig) -> tuple[int, int, int]:
    """(rows, rotary columns, latent columns) of what one copy reads."""
    return config.box_rows, config.rope, config.half
