"""The plan of a problem as a printable value: which kernel, which config, how many CTAs, and why.

`plan` is pure: same problem, same plan, no tensors, no Triton, and no device unless there are tuned choices for one
(tuned/table.py), which it prefers to the planner's own. `print(plan(...))` shows all of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from warpattn.errors import Rules
from warpattn.problem import Problem
from warpattn.problem.arch import RUNS, Arch, known
from warpattn.problem.backends import target_here
from warpattn.problem.eight_bit import check_eight_bit
from warpattn.problem.launch import DEFAULT_OPTIONS, Choice, PlanOptions
from warpattn.problem.operands import RUN
from warpattn.problem.rules import check_limits
from warpattn.runtime.launches import family_of, filled_problem
from warpattn.runtime.tuned.table import TABLE, TUNED_ARCHS, card_here, tuned_row


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
    """Return the plan of a problem on `arch`, one of `TARGETS`; raises AttentionError if its kernels do not take it."""
    runs = RUNS.get(known(arch), arch)
    rules = Rules()
    _check_sizes(rules, problem)
    check_limits(rules, arch, problem.kind, problem.dtype, problem)
    check_eight_bit(rules, arch, problem)
    rules.done()
    filled = filled_problem(problem)
    target = target_here(arch)
    choice = on_chip(_tuned(filled, target, arch) or family_of(runs).choose(filled, target), arch)
    if filled != problem:
        why = f"{problem.dim_qk}/{problem.dim_v} are no multiples of {RUN}: q, k and v are copied, rows filled up with"
        choice = replace(choice, reasons=(*choice.reasons, f"head dims {why} zeros to {filled.dim_qk}/{filled.dim_v}"))
    return Plan(problem, arch, choice)


def _check_sizes(rules: Rules, problem: Problem) -> None:
    """Check the rules of sizes that tensors keep by themselves: none too small, query heads in whole groups."""
    least = {"batch": 1, "seq_q": 0, "seq_k": 0, "heads_q": 1, "heads_kv": 1, "dim_qk": 1, "dim_v": 1}
    for name, bound in least.items():
        size = getattr(problem, name)
        rules.require(size >= bound, f"{name} is {size}", f"{name} must be at least {bound}")
    groups = problem.heads_kv > 0 and problem.heads_q % problem.heads_kv == 0
    what = f"heads_q is {problem.heads_q} and heads_kv is {problem.heads_kv}"
    rules.require(groups, what, "the query heads must be a multiple of the key heads")


def _tuned(problem: Problem, target: Arch, arch: str) -> Choice | None:
    """Return the choice with the configuration tuned for this machine's card, or with the reason why that is ignored;
    None if none was tuned."""
    tuned = arch in TUNED_ARCHS and TABLE.read()
    row = tuned_row(problem, arch, card_here(arch), target) if tuned else None
    if row is None:
        return None
    options = DEFAULT_OPTIONS if row.stale else PlanOptions(candidate=row.candidate)
    choice = family_of(arch).choose(problem, target, options)
    return replace(choice, reasons=(row.words, *choice.reasons))


def on_chip(choice: Choice, arch: str) -> Choice:
    """Add the reason why a choice is that of another chip, if `arch` runs that chip's kernels."""
    if arch not in RUNS:
        return choice
    runs = RUNS[arch]
    own = f"{arch} runs the kernels of {runs} in machine code of its own; tiles are chosen as for {runs}"
    return replace(choice, reasons=(*choice.reasons, own))
