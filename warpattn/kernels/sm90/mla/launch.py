"""The launches of latent attention on Hopper: its kernel, and decode's combining kernel. Arguments, workspace and
row tiles are those of decode."""

from __future__ import annotations

from dataclasses import replace

from warpattn.problem import CheckedCall
from warpattn.problem.launch import Choice, Launch
from warpattn.problem.operands import Operands, is_masked
from warpattn.problem.scales import latent_scales
from warpattn.sequences import PagedRagged, Sequence
from warpattn.sequences.latent import LatentPages

from ...nvidia.arguments import LatentQueryArgs, strided
from ..decode.arguments import ColumnScaledRows, MappedLatents, MappedRows
from ..decode.choice import head_rows, partitions
from ..decode.launch import arguments, combine_launch, features_of, options, workspace
from .config import MlaConfig


def list_launches(
    checked: CheckedCall, x: Operands, sequence: Sequence, choice: Choice
) -> tuple[Launch, ...]:
    """The attention launch and, if needed, that of the combining kernel."""
    checked, config = hiding(checked, choice.config)
    problem = checked.problem
    partial = workspace(problem, choice, head_rows(problem), x.q.device)
    args = arguments(checked, x, sequence, choice) | {"workspace": partial}
    cache = sequence.kv if isinstance(sequence, PagedRagged) else sequence
    rope = x.k
    if isinstance(cache, LatentPages):
        args |= {"k": MappedRows(cache.rope), "v": ColumnScaledRows(x.v, *latent_scales(x.v, cache.v_scale))}
        rope = cache.rope
    if sequence.q_rope is not None:
        args["q"] = LatentQueryArgs(args["q"], strided(sequence.q_rope))
    features = features_of(checked)
    if config.recomputes and not config.gathers:
        args["k"] = MappedLatents(rope, strided(x.v), strided(rope))

    def source():
        from .signature import mla_source  # imports Triton

        return mla_source(args, config, features)

    key = (config, features.key)
    least = args["shape"].queues
    attend = Launch("sm90.mla", "sm90", key, source, options(config), choice.grid, args, persistent=least)
    if not config.combine.separate_kernel or partitions(problem, config, choice.grid[0]) == 1:
        return (attend,)
    return attend, combine_launch(checked, replace(config, own_rope=False, recomputes=False), args, choice.grid[0])


def hiding(checked: CheckedCall, config: MlaConfig) -> tuple[CheckedCall, MlaConfig]:
    """(call, configuration) with the mask that the kernel needs. Where sequences have one query each, conditions that
    hide newer keys hide nothing and are dropped; not with 8-bit latents, where without them one token of 128 sequences
    took up to 6 % longer (H100, bench/notes.md 219)."""
    simpler = of_one_query(checked)
    recomputes = is_masked(simpler.problem) and not config.hides_in_loop
    return simpler if config.latents is None else checked, replace(config, recomputes=recomputes)


def of_one_query(checked: CheckedCall) -> CheckedCall:
    """The call without the conditions of its mask that hide nothing for a single query; unchanged if sequences have
    several."""
    if checked.problem.seq_q > 1:
        return checked
    mask = checked.mask.for_one_query()
    return replace(checked, mask=mask, problem=replace(checked.problem, mask=mask.key))
