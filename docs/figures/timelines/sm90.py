"""Draws sm90.svg: the simulated Hopper prefill kernel, one CTA, causal, head dim 128 (`make docs`)."""

from pathlib import Path

import torch

from docs.figures.timelines.simulated import timeline
from warpattn.kernels.sm90.prefill.config import choose_config
from warpattn.kernels.sm90.prefill.launch import arrange, list_launches
from warpattn.masks import Causal
from warpattn.problem import Call, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.operands import Operands
from warpattn.runtime.simulate import Options, run_launch
from warpattn.sequences import Dense
from warpattn.sim import Report


def run() -> Report:
    """One head of 512 queries and keys, timed by the model of sm_90."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 512, 1, 128).bfloat16() for _ in range(3))
    ready = validate(Call(q, k, v, Dense(), Causal(), backend="simulate:sm90"))
    config, why = choose_config(ready.problem.element, 128, 128, 4096, True)  # that of longer sequences
    choice = arrange(ready.problem, ARCHS["sm90"], config, (why,))
    (launch,) = list_launches(ready, Operands(q, k, v, torch.empty_like(q), None, None), Dense(), choice)
    return run_launch(launch, Options(timing=True, programs=1))


def files() -> dict[Path, str]:
    """Nine thousand cycles in the middle of the run."""
    return {Path(__file__).with_name("sm90.svg"): timeline(run(), start=6000, end=15000)}
