"""Turns a checked call into launches by the functions of its architecture's folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from warpattn.problem import CheckedCall, Problem
from warpattn.problem.arch import RUNS
from warpattn.problem.backends import card_target
from warpattn.problem.launch import DEFAULT_OPTIONS, Choice, Launch, PlanOptions
from warpattn.problem.operands import Operands, whole_runs
from warpattn.runtime.tuned.table import TABLE, tuned_options
from warpattn.sequences import Sequence

Choose = Callable[..., Choice]  # takes a problem, an Arch and, if kernels have candidates, options
ListLaunches = Callable[[CheckedCall, Operands, Sequence, PlanOptions], tuple[Launch, ...]]


def list_launches(
    checked: CheckedCall, operands: Operands, sequence: Sequence, options: PlanOptions = DEFAULT_OPTIONS
) -> tuple[Launch, ...]:
    """Return the launches of a checked call on its backend's architecture, in order; operands are `fitted`. An LSE
    must be fp32: kernels are compiled for the types of their arguments, which no key names."""
    if operands.lse is not None and operands.lse.dtype != torch.float32:
        raise TypeError(f"the LSE of a launch is of fp32, not {str(operands.lse.dtype).removeprefix('torch.')}")
    filled = filled_problem(checked.problem)
    checked = checked if filled == checked.problem else replace(checked, problem=filled)
    arch = checked.backend.removeprefix("simulate:")
    if arch == checked.backend:  # not simulated
        if TABLE.rows is None or TABLE.rows:
            options = tuned_options(checked.problem, arch, operands.q.device, options)
        if operands.q.is_cuda:
            options = replace(options, target=card_target(operands.q.device, arch))
    with torch.device("cpu"):  # planning makes tensors on the host, whatever torch's default device is
        return for_chip(family_of(RUNS.get(arch, arch)).launches(checked, operands, sequence, options), arch)


def filled_problem(problem: Problem) -> Problem:
    """Return the problem that kernels get: head dims padded to whole runs, as `fitted` pads the operands."""
    return replace(problem, dim_qk=whole_runs(problem.dim_qk), dim_v=whole_runs(problem.dim_v))


def for_chip(launches: tuple[Launch, ...], arch: str) -> tuple[Launch, ...]:
    """Have launches compiled for `arch` itself if it runs another architecture's kernels."""
    return tuple(replace(launch, arch=arch) for launch in launches) if arch in RUNS else launches


class Family(NamedTuple):
    """The functions of an architecture's folder."""

    choose: Choose
    launches: ListLaunches


def family_of(arch: str) -> Family:
    """Return the functions of an architecture, imported when they are first needed."""
    if arch == "sm90":
        from warpattn.kernels.sm90.select import choose, list_launches
    elif arch == "sm100":
        from warpattn.kernels.sm100.select import choose, list_launches
    else:
        from warpattn.kernels.cdna.launch import list_launches
        from warpattn.kernels.cdna.select import choose
    return Family(choose, list_launches)
