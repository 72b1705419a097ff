"""Draws docs/figures/sm100.svg: the simulated Blackwell prefill kernel, one CTA, head dim 128 (`make docs`)."""

from pathlib import Path

import torch

from warpattn.kernels.sm100.choose import choose_2q
from warpattn.kernels.sm100.steps import steps_of
from warpattn.masks import Full
from warpattn.operands import Operands
from warpattn.problem import Call, examine
from warpattn.sequences import Dense
from warpattn.sim import Report
from warpattn.simulated import Options, launch


def run(keys: int = 1536) -> Report:
    """One tile of 256 queries of one head, timed by the model of sm_100."""
    torch.manual_seed(0)
    q = torch.randn(1, 256, 1, 128).bfloat16()
    k, v = (torch.randn(1, keys, 1, 128).bfloat16() for _ in range(2))
    ready = examine(Call(q, k, v, Dense(), Full(), backend="simulate:sm100"))
    x = Operands(q, k, v, torch.empty_like(q), None, None)
    (step,) = steps_of(ready, x, Dense(), choose_2q(ready.problem))
    return launch(step, Options(timing=True))


if __name__ == "__main__":
    run().save_timeline(str(Path(__file__).with_name("sm100.svg")), start=20000, end=33000)
