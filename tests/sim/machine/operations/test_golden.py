"""Kernels as Triton 3.9 printed them: the texts in golden/ must still parse, run, and compute what they did.

`python -m tests.sim.machine.operations.test_golden` writes them anew; what git then shows is what a new Triton prints
differently.
"""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.sim.amd import attention, kernels
from tests.sim.builds import compiled, type_of
from warpattn.sim import simulate

FOLDER = Path(__file__).parents[2] / "golden"
_RNG = np.random.default_rng(0)
_X = _RNG.standard_normal((3, 32, 32)).astype(np.float32)
_Q, _K, _V = (torch.from_numpy(_RNG.standard_normal((64, 64))).bfloat16() for _ in range(3))


def _empty(*shape: int) -> np.ndarray:
    return np.full(shape, np.nan, np.float32)


def _attention(arch: str) -> tuple:
    args = {"q": _Q, "k": _K, "v": _V, "out": torch.from_numpy(_empty(64, 64)), "n": 64, "scale": 1.4426950 / 8}
    exact = torch.softmax(_Q.double() @ _K.double().T / 8, -1) @ _V.double()
    constants = {"VERSION": 3 if arch == "gfx942" else 4, "FAULT": ""}
    return arch, attention.attention_kernel, args, constants, exact.numpy(), 4e-3


def cases() -> dict[str, tuple]:
    """By file name: chip, kernel, arguments (the result in `out`), constants, what it computes, tolerance."""
    one = {"x": _X, "out": _empty(32, 32), "n": 21}
    kept = np.where(np.arange(32)[:, None] < 21, _X[0], 5)
    added = {"x": np.ones((3, 32), np.uint32), "out": np.zeros(32, np.uint32)}
    counts = np.where(np.arange(32) < 31, 3, 0)
    ring = {"x": _X, "out": _empty(32, 32), "n": 3}
    return {
        "gfx942_buffer": ("gfx942", kernels.buffer_kernel, one, {"OP": "other"}, kept, 0),
        "gfx950_atomic": ("gfx950", kernels.atomic_kernel, added, {"OP": "add"}, counts, 0),
        "gfx950_ring": ("gfx950", kernels.ring_kernel, ring, {"FAULT": "", "BYTES": 16}, _X.sum(0), 1e-5),
        "gfx942_attention": _attention("gfx942"),
    }


@pytest.mark.parametrize("name", cases())
def test_a_golden_text_runs(name):
    arch, _, args, _, expected, tolerance = cases()[name]
    text = (FOLDER / f"{name}.ttgir").read_text()
    assert arch in text
    report = simulate(text, (3,) if name == "gfx950_atomic" else (1,), args, schedule="lazy")
    assert report.clean, report
    np.testing.assert_allclose(args["out"], expected, rtol=0, atol=tolerance)


def printed(name: str) -> str:
    """What Triton prints, without locations (but with the names of the parameters)."""
    arch, kernel, args, constants, _, _ = cases()[name]
    types = {n: "constexpr" if n in constants else type_of(args[n]) for n in kernel.arg_names}
    text = compiled(kernel, tuple(types.items()), tuple(constants.items()), 4, arch).asm["ttgir"]
    lines = [line for line in text.splitlines() if not line.startswith("#loc")]
    named = [re.sub(r'loc\("(\w+)"\(#loc\d*\)\)', r'loc("\1")', line) for line in lines]
    return "\n".join(re.sub(r" loc\((#loc\d*|unknown)\)", "", line) for line in named) + "\n"


if __name__ == "__main__":
    for file in cases():
        (FOLDER / f"{file}.ttgir").write_text(printed(file))
