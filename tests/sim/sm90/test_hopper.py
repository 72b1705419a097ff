"""TMA boxes of every rank, views of shared memory, maps and inline assembly, against NumPy."""

from itertools import product

import numpy as np
import pytest

pytest.importorskip("triton")

from triton.experimental.gluon import language as gl

from tests.drawn import drawn, each_once
from tests.sim.builds import poison, run
from tests.sim.machine.kernels import gluon as kernels
from warpattn.sim import SimulationError, TensorDescriptor, elementwise

RNG = np.random.default_rng(0)
DTYPES = (np.float16, np.int32)
SHAPES = {1: (56,), 2: (20, 56), 3: (2, 20, 56), 4: (2, 20, 1, 56), 5: (1, 2, 20, 1, 56)}
BOXES = {1: (32,), 2: (16, 32), 3: (2, 16, 32), 4: (2, 16, 1, 32), 5: (1, 2, 16, 1, 32)}


@pytest.mark.parametrize(("rank", "dtype"), drawn(product(SHAPES, DTYPES), each_once(list(SHAPES), DTYPES)))
@pytest.mark.parametrize("corner", [(0, 0), (16, 32), (-4, -8), (100, 0)])
def test_boxes_are_clipped_and_filled_with_zeros(rank, dtype, corner):
    x = RNG.integers(-9, 9, SHAPES[rank]).astype(dtype)
    out, expected = (np.full(tuple(n + 16 for n in x.shape), 77, dtype) for _ in range(2))
    box = BOXES[rank]
    starts = {
        1: corner[:1],
        2: corner,
        3: (0, *corner),
        4: (0, corner[0], 0, corner[1]),
        5: (0, 0, corner[0], 0, corner[1]),
    }
    layout = gl.NVMMASharedLayout.get_default_for(list(box), gl.float16 if dtype == np.float16 else gl.int32)
    args = {
        "x_desc": TensorDescriptor(x, box),
        "out_desc": TensorDescriptor(out, box),
        "c0": corner[0],
        "c1": corner[1],
    }
    report = run(kernels.box_kernel, (1,), args, {"RANK": rank}, layout=layout, schedule="lazy")
    assert report.clean, report
    for place in np.ndindex(*box):
        at = tuple(start + i for start, i in zip(starts[rank], place, strict=True))
        if all(0 <= i < n for i, n in zip(at, out.shape, strict=True)):
            inside = all(i < n for i, n in zip(at, x.shape, strict=True))
            expected[at] = x[at] if inside else 0
    np.testing.assert_array_equal(out, expected)


def test_views_of_shared_memory_alias():
    x = RNG.integers(-99, 99, (32, 32)).astype(np.int32)
    out = poison(3072, np.int32)
    assert run(kernels.views_kernel, (1,), {"x": x, "out": out}).clean
    np.testing.assert_array_equal(out[:1024].reshape(32, 32), x.T + 1)
    np.testing.assert_array_equal(out[1024:1536].reshape(16, 32), x[16:])
    np.testing.assert_array_equal(out[2048:].reshape(32, 32), x)


def test_map_elementwise_takes_a_branch_per_element():
    x, y, out = (RNG.standard_normal(128).astype(np.float32) for _ in range(3))
    assert run(kernels.map_kernel, (1,), {"x": x, "y": y, "out": out}).clean
    np.testing.assert_allclose(out, np.where(x > y, x, x * 2 + y), rtol=1e-6)


def test_known_assembly():
    x, out = RNG.standard_normal(128).astype(np.float32), poison(128)
    assert run(kernels.asm_kernel, (1,), {"x": x, "out": out}, {"TEXT": "tanh.approx.f32 $0, $1;"}).clean
    np.testing.assert_allclose(out, np.tanh(x), rtol=1e-6)


def test_unknown_assembly_is_an_error_until_a_handler_is_registered():
    x, out = RNG.standard_normal(128).astype(np.float32), poison(128)
    constants = {"TEXT": "lg2.approx.f32   $0, $1;"}
    with pytest.raises(SimulationError, match=r"gluon.py:\d+: no handler for the assembly 'lg2.approx.f32 \$0"):
        run(kernels.asm_kernel, (1,), {"x": x, "out": out}, constants)
    elementwise("lg2.approx.f32 $0, $1;")(np.log2)
    x = abs(x)
    assert run(kernels.asm_kernel, (1,), {"x": x, "out": out}, constants).clean
    np.testing.assert_allclose(out, np.log2(x), rtol=1e-6)
