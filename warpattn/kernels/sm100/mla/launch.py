"""The launches of latent attention on Blackwell: the decode kernel and, where keys are split, the combination."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from warpattn.problem import CheckedCall
from warpattn.problem.arch import compile_options
from warpattn.problem.launch import Choice, Launch
from warpattn.problem.operands import Operands, modifier_args, programs, run_strides
from warpattn.problem.scales import ScaleRows, Scales, latent_scales
from warpattn.sequences import PagedRagged, Sequence
from warpattn.sequences.latent import LatentPages

from ...nvidia.arguments import LatentQueryArgs, StridedArgs, UsedRows
from ...nvidia.combine_launch import combine_launch, workspace
from ..sequence_args import UNMAPPED, Lengths, key_addresses, key_args, ragged_args, used_rows
from ..traits import Traits
from .config import LatentConfig

OPTIONS = compile_options()


def latent_launches(checked: CheckedCall, x: Operands, sequence: Sequence, choice: Choice) -> tuple[Launch, ...]:
    """The launches of `choice`."""

    def source(*described: Any) -> Any:
        from .signature import latent_source  # imports Triton

        return latent_source(*described)

    args = latent_args(checked, x, sequence, choice.config)
    return row_launches(checked, x, args, choice, source, used_rows(sequence))


def row_launches(
    checked: CheckedCall, x: Operands, keys: dict[str, Any], choice: Choice, source: Callable[..., Any],
    used: UsedRows | None = None,
) -> tuple[Launch, ...]:
    """The launches of a kernel whose rows are tokens and heads of a group; `source`: of its arguments, config, traits,
    mask and score; used: the rows whose parts are combined, all without it."""
    problem = checked.problem
    group = problem.heads_q // problem.heads_kv
    if choice.partitions == 1:
        traits = Traits(problem.kind, group, problem.has_sinks, problem.has_lse)
        return (_launch(checked, x, keys, choice, traits, source),)
    parts = workspace(problem, choice.partitions, choice.config.padded_ov_depth, x.q)
    traits = Traits(problem.kind, group, has_sinks=False, has_lse=True)
    to_parts = x._replace(out=parts.o, lse=parts.denominators.transpose(1, 2))
    first = _launch(checked, to_parts, keys, choice, traits, source)
    return first, combine_launch("sm100", checked, x, choice.partitions, parts, used)


def _strided(x: Tensor | None, strides: tuple[int, ...]) -> StridedArgs:
    """Rows by token and head, and by batch unless sequences lie end to end."""
    return StridedArgs(x, *[0] * (3 - len(strides)), *strides)


def _rows(x: Tensor) -> StridedArgs:
    """Rows of columns, strides in runs of 8 elements."""
    return _strided(x, run_strides(x))


def _launch(
    checked: CheckedCall, x: Operands, keys: dict[str, Any], choice: Choice, traits: Traits, source: Callable[..., Any]
) -> Launch:
    """The launch of a kernel."""
    problem = checked.problem
    mask, score = programs(checked)
    lse = (0, 0, 0) if x.lse is None else x.lse.mT.stride()
    args = keys | {
        "q": keys.get("q") or _rows(x.q), "out": _rows(x.out), "lse": _strided(x.lse, lse), "sinks_ptr": x.sinks,
        "scale": keys.get("scale", checked.scale), "shape": Lengths(problem.seq_q, problem.seq_k),
        **modifier_args(checked),
    }  # fmt: skip

    key = (choice.config, traits, mask.key, None if score is None else score.key)
    described = partial(source, args, choice.config, traits, mask, score)
    return Launch(f"sm100.{choice.kernel}", "sm100", key, described, OPTIONS, choice.grid, args)


def latent_args(checked: CheckedCall, x: Operands, sequence: Sequence, config: LatentConfig) -> dict[str, Any]:
    """The kernel's arguments for keys, of a cache of 8-bit latents with the rotary parts as keys, and their scales; and
    for queries in two tensors."""
    box = config.box_rows, config.rope, config.half
    more: dict[str, Any] = {}
    if sequence.q_rope is not None:
        more["q"] = LatentQueryArgs(_rows(x.q), _rows(sequence.q_rope))
    cache = sequence.kv if isinstance(sequence, PagedRagged) else sequence
    if isinstance(cache, LatentPages):
        none, x = ScaleRows(None, 0, 0, 0), x._replace(k=cache.rope)
        more["scale"] = Scales(checked.scale, none, latent_scales(x.v, cache.v_scale), none)
    more["recompute_args"] = key_addresses(checked.mask.keep, x)
    if isinstance(sequence, PagedRagged):
        return ragged_args(x, sequence, box, (UNMAPPED, UNMAPPED)) | more
    return key_args(x, sequence, box) | more
