"""Main kernels of the backward, compiled once for all tests that look at machine code."""

from dataclasses import replace
from functools import cache
from typing import Any

import torch

from tests.launches import small_call
from warpattn.masks import Causal, Full, Mask, SlidingWindow
from warpattn.problem import Call, Problem, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.backward import CheckedBackward, Gradients
from warpattn.problem.launch import Choice
from warpattn.runtime import compiler
from warpattn.scores import Score
from warpattn.sequences import Dense

MASKS: dict[str, Mask] = {"full": Full(), "causal": Causal(), "window": SlidingWindow(64)}


def long_problem(dim: int, mask: str = "full", dim_v: int | None = None, group: int = 1) -> Problem:
    """A problem of a long sequence."""
    wide, dims = torch.empty(1, dtype=torch.bfloat16), (dim, dim, dim_v or dim)
    q, k, v = (wide.expand(1, 16384, heads, n) for heads, n in zip((group, 1, 1), dims, strict=True))
    return validate(Call(q, k, v, Dense(), MASKS[mask], backend="reference"), read_values=False).problem


@cache
def compiled(
    arch: str, dims: tuple[int, int], mask: str, chip: str = "", group: int = 1, score: Score | None = None, *,
    deterministic: bool = False,
) -> Any:  # fmt: skip
    """The main kernel of a long problem for a chip, that of the architecture if none is named."""
    from tests.sim.backward import KERNELS

    choose, list_backward_launches = KERNELS[arch]
    small = small_call(arch, dims, modifiers=(MASKS[mask], score))
    q, k, v, out, lse, _ = (None if x is None else x.detach().clone() for x in small.x)
    x = Gradients(q, k, v, out, lse, out.clone(), None, None, q.clone(), k.clone(), v.clone(), None)
    config = choose(long_problem(dims[0], mask, dims[1], group), ARCHS[arch], deterministic).config
    choice: Choice = replace(choose(small.checked.problem, ARCHS[arch], deterministic), config=config)
    launches = list_backward_launches(CheckedBackward.of(small.checked, deterministic), x, small.sequence, choice)
    (launch,) = (launch for launch in launches if launch.name == f"{arch}.backward")
    return compiler.compiled(launch, chip)
