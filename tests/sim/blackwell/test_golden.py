"""TTGIR of sm_100 kernels as the supported Triton prints it: it must not change unseen, and the stored text must run.

python -m tests.sim.blackwell.test_golden      writes the texts anew
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from triton.experimental.gluon import language as gl

from tests.sim.blackwell import kernels as kernels
from tests.sim.blackwell.test_blackwell import built
from tests.sim.builds import poison
from warpattn.sim import TensorDescriptor, simulate

FOLDER = Path(__file__).parents[1] / "golden"
RNG = np.random.default_rng(0)


def copy_case() -> tuple[Any, dict, dict, Any]:
    x = RNG.standard_normal((128, 32)).astype(np.float32)
    args = {"x_desc": TensorDescriptor(torch.from_numpy(x), (128, 32)), "out": poison((128, 32))}
    return kernels.copy_kernel, args, {"FAULT": ""}, x


def product_case() -> tuple[Any, dict, dict, Any]:
    a, b = (torch.from_numpy(RNG.standard_normal(shape).astype(np.float16)) for shape in ((64, 128), (128, 64)))
    args = {"a_desc": TensorDescriptor(a, (64, 64)), "b_desc": TensorDescriptor(b, (64, 64)), "out": poison((64, 64))}
    return kernels.matmul_kernel, {**args, "steps": 2}, {"FAULT": ""}, (a.float() @ b.float()).numpy()


def views_case() -> tuple[Any, dict, dict, Any]:
    x = RNG.standard_normal((128, 64)).astype(np.float32)
    expected = np.concatenate((x[:, 32:], x[:, :32])).reshape(-1)
    sizes = {"M": 128, "N": 64, "BM": 128, "BN": 64}
    return kernels.tiles_kernel, {"x": x, "out": poison(2 * 128 * 64)}, sizes, (x, expected)


def packed_case() -> tuple[Any, dict, dict, Any]:
    x, y = (RNG.standard_normal(256).astype(np.float32) for _ in range(2))
    return kernels.packed_kernel, {"x": x, "y": y, "out": poison(1024)}, {"DTYPE": gl.float32}, (x + y, x - y, x * y)


CASES = {"copy": copy_case, "product": product_case, "views": views_case, "packed": packed_case}


def text_of(case: tuple) -> str:
    """The TTGIR without locations; names of parameters stay."""
    kernel, args, constants, _ = case
    text = built(kernel, args, constants).asm["ttgir"]
    return re.sub(r"^#loc.*\n", "", re.sub(r" loc\(#loc\d*\)", "", text), flags=re.MULTILINE)


@pytest.mark.parametrize("name", CASES)
def test_triton_prints_the_stored_text(name):
    assert text_of(CASES[name]()) == (FOLDER / f"sm100_{name}.ttgir").read_text()


@pytest.mark.parametrize("name", CASES)
def test_the_stored_text_runs(name):
    _, args, _, expected = CASES[name]()
    report = simulate((FOLDER / f"sm100_{name}.ttgir").read_text(), (1,), args, schedule="lazy")
    assert report.clean, report
    parts = expected if isinstance(expected, tuple) else (expected,)
    flat = np.concatenate([np.ravel(part) for part in parts])
    np.testing.assert_allclose(args["out"].reshape(-1)[: flat.size], flat, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, case in CASES.items():
        (FOLDER / f"sm100_{name}.ttgir").write_text(text_of(case()))
