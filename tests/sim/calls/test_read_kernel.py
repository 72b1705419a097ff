"""The kernel that only reads, which benchmarks are compared with: every tile lands, and none is left behind."""

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget

from bench.measure.read_kernel import read_step
from warpattn.sim import simulate
from warpattn.sim.compile import to_ttgir


@pytest.mark.parametrize("schedule", ["eager", "lazy", "adversarial", "random"])
@pytest.mark.parametrize("programs", [1, 3, 40])
def test_every_tile_lands(programs, schedule):
    k, v = torch.randn(2, 2, 384, 2, 64, dtype=torch.bfloat16)
    step = read_step(k, v)
    compiled = to_ttgir(step.source(), GPUTarget("cuda", 90, 32), dict(step.options))
    report = simulate(compiled, (programs,), step.args, schedule=schedule)
    assert report.clean, report


def test_what_it_cannot_read():
    k = torch.zeros(1, 100, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="128 keys a tile"):
        read_step(k, k)
