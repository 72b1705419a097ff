"""Which Blackwell kernel a problem gets, and the launches of a call."""

from __future__ import annotations

from dataclasses import replace

from warpattn.problem import CheckedCall, Problem, is_latent
from warpattn.problem.arch import ARCHS, Arch
from warpattn.problem.launch import Choice, Launch, PlanOptions
from warpattn.problem.operands import COPY_RULE, Operands
from warpattn.sequences import Sequence

from ..nvidia.combine_launch import combine_launch, workspace
from .launch import prefill_launch
from .mla.config import choose_latent
from .mla.launch import latent_launches
from .prefill_1q.config import choose_1q
from .prefill_2cta.config import NOT_CHOSEN
from .prefill_2q.config import choose_2q, prefill_config
from .sequence_args import used_rows
from .traits import Traits
from .wide.config import choose_wide, is_wide
from .wide.launch import wide_launches


def choose(problem: Problem, target: Arch) -> Choice:
    """The choice for a `problem`: one CTA for two query tiles of one head, or of all heads of a group; where that would
    leave SMs without work, for one query tile or a part of its keys.

    For ragged batches the grid is an upper bound: that of sequences with as many queries as known at most.
    """
    if is_latent(problem):
        return choose_latent(problem, target)
    if is_wide(problem):
        return choose_wide(problem, target)
    config, reasons = prefill_config(problem)
    one = choose_1q(problem, config, target)
    if one is not None:
        return replace(one, reasons=(*one.reasons, *reasons, COPY_RULE))
    two = choose_2q(problem)
    return replace(two, reasons=(*two.reasons, NOT_CHOSEN))


def list_launches(checked: CheckedCall, x: Operands, sequence: Sequence, options: PlanOptions) -> tuple[Launch, ...]:
    """The launch of a prefill kernel, and that of the combination where keys are split; batch-invariant is always two
    query tiles and whole keys."""
    problem, target = checked.problem, options.target or ARCHS["sm100"]
    if is_latent(problem):
        latent = choose_latent(problem, target, options)
        return latent_launches(checked, x, sequence, latent)
    if is_wide(problem):
        return launches_of_choice(checked, x, sequence, choose_wide(problem, target, options))
    choice = choose_2q(problem) if options.batch_invariant else choose(problem, target)
    return launches_of_choice(checked, x, sequence, choice)


def launches_of_choice(checked: CheckedCall, x: Operands, sequence: Sequence, choice: Choice) -> tuple[Launch, ...]:
    """The launches of a choice for any head dims but those of latent attention."""
    problem = checked.problem
    if is_wide(problem):
        return wide_launches(checked, x, sequence, choice)
    if choice.partitions == 1:
        traits = Traits(problem.kind, problem.heads_q // problem.heads_kv, problem.has_sinks, problem.has_lse)
        return (prefill_launch(checked, x, sequence, choice, traits),)
    parts = workspace(problem, choice.partitions, choice.config.padded_ov_depth, x.q)
    traits = Traits(problem.kind, problem.heads_q // problem.heads_kv, has_sinks=False, has_lse=True)
    rows = parts.o.flatten(0, 1) if problem.ragged_queries else parts.o
    first = prefill_launch(checked, x._replace(out=rows, lse=parts.denominators), sequence, choice, traits)
    return first, combine_launch("sm100", checked, x, choice.partitions, parts, used_rows(sequence))
