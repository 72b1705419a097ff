"""The launches of a backward call on Hopper."""

from __future__ import annotations

from collections.abc import Sequence as Many
from functools import partial
from typing import Any

from torch import Tensor

from warpattn.problem.arch import compile_options
from warpattn.problem.backward import CheckedBackward, Gradients
from warpattn.problem.launch import Launch
from warpattn.problem.operands import modifier_args, programs
from warpattn.sequences import Ragged, Sequence

from ...nvidia.arguments import strided
from ...nvidia.backward.arguments import Statistics
from ...nvidia.backward.launch import MainKernel, backward_launches
from ...nvidia.backward.order import padded_rows
from .config import CAPTURED_ROWS, CapturedShape, choose, choose_config

OPTIONS = compile_options()


def _main_source(*of: Any) -> Any:
    from .signature import main_source  # imports Triton

    return main_source(*of)


list_backward_launches = partial(backward_launches, MainKernel("sm90", choose, _main_source))


def list_captured_launches(
    checked: CheckedBackward, x: Gradients, sequence: Sequence, wanted: Many[bool], sums: Many[Tensor | None]
) -> tuple[Launch, ...]:
    """The launch that adds the gradients of what the score captured to `sums`, fp32 and contiguous, one for each tensor
    where it is `wanted`; in any order."""
    forward = checked.forward
    problem, derivative = forward.problem, forward.score.derivative
    config, _ = choose_config(problem)
    adjoints = tuple(adjoint for adjoint in derivative.adjoints if wanted[adjoint.slot])
    mask, score = programs(forward)
    has_dlse, cu_q, cu_k = x.dlse is not None, None, None
    if isinstance(sequence, Ragged):
        cu_q = sequence.cu_q.contiguous()
        cu_k = cu_q if sequence.cu_k is None else sequence.cu_k.contiguous()
    group = problem.heads_q // problem.heads_kv
    args = {
        "reads": tuple(strided(tensor) for tensor in (x.q, x.k, x.v, x.dout)),
        "statistics": Statistics(x.lse, x.dlse, None), "sums": tuple(sums[adjoint.slot] for adjoint in adjoints),
        "cu_q": cu_q, "cu_k": cu_k, "scale": forward.scale,
        "shape": CapturedShape(problem.batch, problem.seq_q, problem.seq_k, problem.heads_q, group),
        **modifier_args(forward),
    }  # fmt: skip

    def source():
        from .signature import captured_source  # imports Triton

        return captured_source(args, config, mask, score, adjoints, has_dlse)

    heads = problem.heads_q * (1 if config.ragged else problem.batch)
    grid = ((padded_rows(problem) if config.ragged else problem.seq_q + CAPTURED_ROWS - 1) // CAPTURED_ROWS, heads)
    key = (config, mask.key, score.key, tuple(wanted), has_dlse)
    return (Launch("sm90.backward_captured", "sm90", key, source, OPTIONS, grid, args),)
