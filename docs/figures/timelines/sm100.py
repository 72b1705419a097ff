"""Draws timelines of the simulated Blackwell kernels, head dim 128 (`make docs`): a CTA of two query tiles, and one of
one query tile. The model has no times for clusters, so there is none of a pair."""

from dataclasses import replace
from pathlib import Path

import torch

from docs.figures.timelines.simulated import timeline
from warpattn.kernels.sm100.prefill_1q.config import choice_of
from warpattn.kernels.sm100.prefill_2q.config import choose_2q, prefill_config
from warpattn.kernels.sm100.select import launches_of_choice
from warpattn.masks import Full
from warpattn.problem import Call, Problem, validate
from warpattn.problem.launch import Choice
from warpattn.problem.operands import Operands
from warpattn.runtime.simulate import Options, run_launch
from warpattn.sequences import Dense
from warpattn.sim import Report

HERE = Path(__file__).parent


def one_query_tile(problem: Problem) -> Choice:
    """The kernel of short prompts, its keys not split."""
    return choice_of(problem, replace(prefill_config(problem)[0], BM=128, max_qk_stages=None).gluon()[0])


# Name -> (queries of one tile, the choice, first and last cycle of the picture)
KINDS = {
    "sm100": (256, choose_2q, (20000, 29000)),
    "sm100-1q": (128, one_query_tile, (12000, 18000)),
}


def run(name: str = "sm100", keys: int = 1536) -> Report:
    """One tile of queries of one head, timed by the model of sm_100."""
    rows, choose, _ = KINDS[name]
    torch.manual_seed(0)
    q = torch.randn(1, rows, 1, 128).bfloat16()
    k, v = (torch.randn(1, keys, 1, 128).bfloat16() for _ in range(2))
    ready = validate(Call(q, k, v, Dense(), Full(), backend="simulate:sm100"))
    x = Operands(q, k, v, torch.empty_like(q), None, None)
    (step,) = launches_of_choice(ready, x, Dense(), choose(ready.problem))
    return run_launch(step, Options(timing=True))


def files() -> dict[Path, str]:
    """One timeline of each kind."""
    return {HERE / f"{name}.svg": timeline(run(name), start, end) for name, (_, _, (start, end)) in KINDS.items()}
