"""The launch that computes gradients of tensors that a score captures."""

from __future__ import annotations

from collections.abc import Sequence as Many

from torch import Tensor

from warpattn.problem.arch import ARCHS
from warpattn.problem.backward import CheckedBackward, Gradients
from warpattn.problem.launch import Launch
from warpattn.problem.operands import modifier_args, programs
from warpattn.sequences import Ragged, Sequence

from ..arguments import strided
from .arguments import CAPTURED_ROWS, CapturedPrograms, CapturedShape, Statistics
from .launch import OPTIONS, BackwardKernels
from .order import padded_rows


def captured_launches(
    kernels: BackwardKernels, checked: CheckedBackward, x: Gradients, sequence: Sequence, wanted: Many[bool],
    sums: Many[Tensor | None],
) -> tuple[Launch, ...]:  # fmt: skip
    """The launch that adds the gradients of captured tensors to `sums` (fp32, contiguous), for each tensor that is
    `wanted`. The order of additions is not fixed."""
    forward = checked.forward
    problem, score = forward.problem, forward.score
    config = kernels.choose(problem, ARCHS[kernels.arch], False).config
    mask, traced = programs(forward)
    assert score is not None and traced is not None  # else nothing is captured
    adjoints = tuple(adjoint for adjoint in score.derivative.adjoints if wanted[adjoint.slot])
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

        compiled_for = CapturedPrograms(mask, traced, adjoints)
        return captured_source(args, config, compiled_for, has_dlse, kernels.arch, kernels.device_code())

    heads = problem.heads_q * (1 if config.ragged else problem.batch)
    grid = ((padded_rows(problem) if config.ragged else problem.seq_q + CAPTURED_ROWS - 1) // CAPTURED_ROWS, heads)
    key = (config, mask.key, score.key, tuple(wanted), has_dlse)
    return (Launch(f"{kernels.arch}.backward_captured", kernels.arch, key, source, OPTIONS, grid, args),)
