"""Plans a backward and lists its launches: which kernels, with which configuration, and why."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from warpattn.errors import Rules
from warpattn.language.nodes import reads
from warpattn.problem import Problem
from warpattn.problem.arch import RUNS
from warpattn.problem.backends import target_here
from warpattn.problem.backward import CheckedBackward, Gradients
from warpattn.problem.gradients import check_backward
from warpattn.problem.launch import Launch
from warpattn.runtime.launches import Choose, filled_problem, for_chip
from warpattn.runtime.plan import Plan, on_chip, plan
from warpattn.sequences import Sequence

CAPTURED = (
    "gradients of tensors that the score captured are added by atomic additions of a kernel of its own; deterministic "
    "ones by torch operations on the device, the slower form"
)
CAPTURED_IN_ORDER = (
    "gradients of tensors that the score captured are added by torch operations on the device, the slower form"
)


def plan_backward(problem: Problem, arch: str = "sm90") -> Plan:
    """Return the plan of a problem's gradients; raises AttentionError if `arch` has no backward that takes it."""
    plan(problem, arch)  # the forward's rules
    rules = Rules()
    check_backward(rules, arch, ("q", "k", "v"), problem, problem.kind)
    rules.done()
    runs = RUNS.get(arch, arch)
    choice = on_chip(_backward(runs).choose(filled_problem(problem), target_here(arch)), arch)
    if problem.score is not None and reads(problem.score).tensors:
        why = CAPTURED if _backward(runs).captured else CAPTURED_IN_ORDER
        choice = replace(choice, reasons=(*choice.reasons, why))
    return Plan(problem, arch, choice)


def list_backward_launches(checked: CheckedBackward, x: Gradients, sequence: Sequence) -> tuple[Launch, ...]:
    """Return the launches of a checked backward on its backend's architecture, in order; tensors are fitted."""
    arch = checked.forward.backend.removeprefix("simulate:")
    with torch.device("cpu"):  # see `list_launches`
        return for_chip(_backward(RUNS.get(arch, arch)).launches(_filled_backward(checked), x, sequence), arch)


def list_captured_launches(
    checked: CheckedBackward, x: Gradients, sequence: Sequence, wanted: Many[bool], sums: Many[Tensor | None]
) -> tuple[Launch, ...]:
    """Return the launches that add gradients of the score's captured tensors to `sums`; tensors are fitted."""
    arch = checked.forward.backend.removeprefix("simulate:")
    captured = _backward(RUNS.get(arch, arch)).captured
    assert captured is not None  # see `BackwardLimits.captured`
    with torch.device("cpu"):
        return for_chip(captured(_filled_backward(checked), x, sequence, wanted, sums), arch)


def _filled_backward(checked: CheckedBackward) -> CheckedBackward:
    return replace(checked, forward=replace(checked.forward, problem=filled_problem(checked.forward.problem)))


class _Backward(NamedTuple):
    """The functions of an architecture's backward folder."""

    choose: Choose
    launches: Callable[[CheckedBackward, Gradients, Sequence], tuple[Launch, ...]]
    captured: Callable[..., tuple[Launch, ...]] | None  # None: torch operations


def _backward(arch: str) -> _Backward:
    """Return the functions of an architecture's backward, imported when they are first needed."""
    if arch == "sm90":
        from warpattn.kernels.sm90.backward.config import choose
        from warpattn.kernels.sm90.backward.launch import list_backward_launches, list_captured_launches
    elif arch == "sm100":
        from warpattn.kernels.sm100.backward.config import choose
        from warpattn.kernels.sm100.backward.launch import list_backward_launches, list_captured_launches
    else:
        from warpattn.kernels.cdna.backward.config import choose
        from warpattn.kernels.cdna.backward.launch import list_backward_launches

        list_captured_launches = None
    return _Backward(choose, list_backward_launches, list_captured_launches)
