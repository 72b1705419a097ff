"""The launches of latent attention on Hopper: its kernel, and decode's combining kernel. Arguments, workspace and row
tiles are decode's."""

from __future__ import annotations

import torch
from torch import Tensor

from warpattn.problem import CheckedCall
from warpattn.problem.arch import ARCHS, compile_options
from warpattn.problem.launch import Choice, Launch
from warpattn.problem.operands import Operands, programs
from warpattn.sequences import Sequence
from warpattn.sequences.latent import LatentPages

from ..decode.arguments import ColumnScaledRows, MappedRows
from ..decode.launch import arguments, combine_launch, head_rows, launch_key, workspace
from .config import choose


def list_launches(
    checked: CheckedCall, x: Operands, sequence: Sequence, choice: Choice | None = None
) -> tuple[Launch, ...]:
    """Both kernels; `choice` replaces the one made from the problem."""
    choice = choose(checked.problem, ARCHS["sm90"]) if choice is None else choice
    problem, config = checked.problem, choice.config
    partial = workspace(problem, choice, head_rows(problem), x.q.device)
    args = arguments(checked, x, sequence, choice) | {"workspace": partial}
    if isinstance(sequence, LatentPages):
        args |= {"k": MappedRows(sequence.rope), "v": scaled_latents(x.v, sequence.v_scale)}
    mask, score = programs(checked)

    def source():
        from .signature import mla_source  # imports Triton

        return mla_source(config, mask, score, problem.has_sinks, problem.has_lse)

    key = launch_key(checked, config)
    attend = Launch("sm90.mla", "sm90", key, source, compile_options(), choice.grid, args, persistent=True)
    return attend, combine_launch(checked, config, args)


def scaled_latents(x: Tensor, scale: Tensor | None) -> ColumnScaledRows:
    """Latents (pages, page size, heads, columns) of 8 bits; without a scale it is 1."""
    scale = x.new_ones((), dtype=torch.float32) if scale is None else scale
    steps = scale.stride()
    rest = (*[0] * 3, 0) if scale.ndim == 0 else (0, 0, *steps, 0) if scale.ndim == 1 else (*steps, 0)[:4]
    return ColumnScaledRows(x, scale, *rest)
