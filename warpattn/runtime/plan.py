"""From a problem to a launch: which kernel, which config, how many CTAs, and why.

`plan` is pure: same problem, same plan, no tensors, no Triton, and no device unless there are choices that were tuned
on one (tuned/table.py), which go before the planner's own. `print(plan(...))` shows all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from warpattn.errors import Rules
from warpattn.problem import CheckedCall, Problem
from warpattn.problem.arch import ARCHS, RUNS, known
from warpattn.problem.eight_bit import check_eight_bit
from warpattn.problem.launch import DEFAULT_OPTIONS, Choice, Launch, PlanOptions
from warpattn.problem.operands import RUN, Operands, whole_runs
from warpattn.problem.rules import check_limits, check_sizes
from warpattn.runtime.tuned.table import TABLE, TUNED_ARCHS, card_here, tuned_options, tuned_row
from warpattn.sequences import Sequence

Choose = Callable[..., Choice]  # of a problem, an Arch and, where kernels have candidates, options
ListLaunches = Callable[[CheckedCall, Operands, Sequence, PlanOptions], tuple[Launch, ...]]


@dataclass(frozen=True)
class Plan:
    """A decision about one problem on one architecture."""

    problem: Problem
    arch: str
    choice: Choice

    @property
    def kernel(self) -> str:
        """Architecture and kernel, such as "sm90.prefill"; on sm103 those of sm100."""
        return f"{RUNS.get(self.arch, self.arch)}.{self.choice.kernel}"

    def __str__(self) -> str:
        p = self.problem
        lines = [
            f"{self.kernel} on {self.arch}: batch {p.batch}, seq {p.seq_q} x {p.seq_k}, "
            f"heads {p.heads_q}/{p.heads_kv}, head dim {p.dim_qk}/{p.dim_v}, {_name(p.dtype)}"
            + (f", {'queries, ' if p.q_dtype else ''}keys and values {_name(p.kv_dtype)}" if p.kv_dtype else ""),
            *(f"  {line}" for line in self.choice.lines()),
            *(f"  because {reason}" for reason in self.choice.reasons),
        ]
        return "\n".join(lines)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def plan(problem: Problem, arch: str = "sm90") -> Plan:
    """The plan of a `problem` on `arch`, one of `TARGETS`; AttentionError where its kernels do not take it."""
    runs = RUNS.get(known(arch), arch)
    rules = Rules()
    check_sizes(rules, problem)
    check_limits(rules, arch, problem.kind, problem.dtype, problem)
    check_eight_bit(rules, arch, problem)
    rules.done()
    filled = filled_problem(problem)
    choice = on_chip(_tuned(filled, arch) or _family(runs).choose(filled, ARCHS[runs]), arch)
    if filled != problem:
        why = f"{problem.dim_qk}/{problem.dim_v} are no multiples of {RUN}: q, k and v are copied, rows filled up with"
        choice = replace(choice, reasons=(*choice.reasons, f"head dims {why} zeros to {filled.dim_qk}/{filled.dim_v}"))
    return Plan(problem, arch, choice)


def _tuned(problem: Problem, arch: str) -> Choice | None:
    """The choice with the tuned configuration of the card in this machine, or why its row is ignored; None without a
    row."""
    row = tuned_row(problem, arch, card_here(arch)) if arch in TUNED_ARCHS and TABLE.read() else None
    if row is None:
        return None
    options = DEFAULT_OPTIONS if row.stale else PlanOptions(candidate=row.candidate)
    choice = _family(arch).choose(problem, ARCHS[arch], options)
    return replace(choice, reasons=(row.words, *choice.reasons))


def on_chip(choice: Choice, arch: str) -> Choice:
    """A choice with the reason why it is that of another chip, where `arch` runs its kernels."""
    if arch not in RUNS:
        return choice
    runs = RUNS[arch]
    own = f"{arch} runs the kernels of {runs} in machine code of its own; tiles are chosen as for {runs}"
    return replace(choice, reasons=(*choice.reasons, own))


def filled_problem(problem: Problem) -> Problem:
    """The problem that kernels get: head dims filled up to whole runs, as `fitted` does with the operands."""
    return replace(problem, dim_qk=whole_runs(problem.dim_qk), dim_v=whole_runs(problem.dim_v))


def list_launches(
    checked: CheckedCall, operands: Operands, sequence: Sequence, options: PlanOptions = DEFAULT_OPTIONS
) -> tuple[Launch, ...]:
    """The launches of a checked call on its backend's architecture, in order; operands are `fitted`. TypeError for an
    LSE of another dtype than fp32, since kernels are compiled for the types of their arguments, which no key names."""
    if operands.lse is not None and operands.lse.dtype != torch.float32:
        raise TypeError(f"the LSE of a launch is of fp32, not {_name(operands.lse.dtype)}")
    filled = filled_problem(checked.problem)
    checked = checked if filled == checked.problem else replace(checked, problem=filled)
    arch = checked.backend.removeprefix("simulate:")
    if (TABLE.rows is None or TABLE.rows) and arch == checked.backend:  # not simulated
        options = tuned_options(checked.problem, arch, operands.q.device, options)
    return for_chip(_family(RUNS.get(arch, arch)).launches(checked, operands, sequence, options), arch)


def for_chip(launches: tuple[Launch, ...], arch: str) -> tuple[Launch, ...]:
    """The launches in machine code of the chip's own, where it runs another architecture's kernels."""
    return tuple(replace(launch, arch=arch) for launch in launches) if arch in RUNS else launches


class _Family(NamedTuple):
    """What an architecture's folder has."""

    choose: Choose
    launches: ListLaunches


def _family(arch: str) -> _Family:
    """The functions of an architecture, imported when they are first needed."""
    if arch == "sm90":
        from warpattn.kernels.sm90.select import choose, list_launches
    elif arch == "sm100":
        from warpattn.kernels.sm100.select import choose, list_launches
    else:
        from warpattn.kernels.cdna.launch import list_launches
        from warpattn.kernels.cdna.select import choose
    return _Family(choose, list_launches)
