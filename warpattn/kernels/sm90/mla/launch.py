"""The launches of latent attention on Hopper: its kernel, and decode's combining kernel. Arguments, workspace and row
tiles are decode's."""

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
from ..decode.choice import partitions
from ..decode.launch import arguments, combine_launch, features_of, head_rows, options, workspace


def list_launches(
    checked: CheckedCall, x: Operands, sequence: Sequence, choice: Choice
) -> tuple[Launch, ...]:
    """The attention kernel and, if it leaves parts behind, the one that adds them up."""
    checked, config = of_one_query(checked), choice.config
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
    if config.recomputes and is_masked(checked.problem) and not config.gathers:
        args["k"] = MappedLatents(rope, strided(x.v), strided(rope))

    def source():
        from .signature import mla_source  # imports Triton

        return mla_source(args, config, features)

    key = (config, features.key)
    attend = Launch("sm90.mla", "sm90", key, source, options(config), choice.grid, args, persistent=True)
    if not config.combine.separate_kernel or partitions(problem, config, choice.grid[0]) == 1:
        return (attend,)
    return attend, combine_launch(checked, replace(config, own_rope=False), args)


def of_one_query(checked: CheckedCall) -> CheckedCall:
    """The call without conditions of its mask that hide nothing, as sequences have one query each; others as they
    are."""
    if checked.problem.seq_q > 1:
        return checked
    mask = checked.mask.for_one_query()
    return replace(checked, mask=mask, problem=replace(checked.problem, mask=mask.key))
