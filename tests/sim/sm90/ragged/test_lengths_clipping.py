"""Boxes clipped at a sequence's end through addresses that wrap around: what the simulated TMA reads and writes."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from tests.sim.builds import run
from warpattn.kernels.nvidia.clipped_map import clipped_map
from warpattn.kernels.nvidia.clipped_rows import ClippedRows
from warpattn.sim import SimulationError, TensorDescriptor

ROWS, COLS = 16, 64
BOX = (1, 1, ROWS, 1, COLS)
LAYOUT = gl.constexpr(gl.NVMMASharedLayout.get_default_for(list(BOX), gl.bfloat16))


@gluon.jit
def copy_kernel(source, target, start, length, row, head, step, unit):
    """One box of a sequence to the same place of another tensor."""
    smem = gl.allocate_shared_memory(gl.bfloat16, [1, 1, 16, 1, 64], LAYOUT)
    bar = mbarrier.allocate_mbarrier(batch=1).index(0)
    mbarrier.init(bar, count=1)
    fence_async_shared()
    mbarrier.expect(bar, 16 * 64 * 2)
    ClippedRows(source, step, unit).load(start, length, row, head, bar, smem)
    mbarrier.wait(bar, 0)
    ClippedRows(target, step, unit).store(start, length, row, head, 0, smem)
    tma.store_wait(0, read_only=False)


def copied(source: torch.Tensor, target: torch.Tensor, start: int, length: int, row: int, head: int):
    """The report of a copy of a box between tensors of the same strides."""
    found, step, unit = clipped_map("source", source, ROWS, COLS)
    other, _, _ = clipped_map("target", target, ROWS, COLS)
    args = {
        "source": TensorDescriptor(*found), "target": TensorDescriptor(*other), "start": start, "length": length,
        "row": row, "head": head, "step": step, "unit": unit,
    }  # fmt: skip
    return run(copy_kernel, (1,), args, layout=LAYOUT.value)


PLACES = [(0, 40, 0), (7, 5, 0), (30, 20, 16), (3, 0, 0), (48, 2, 0), (5, 9, 16)]


@pytest.mark.parametrize(("start", "length", "row"), PLACES)
def test_only_rows_of_the_sequence_move(start, length, row):
    source = torch.randn(50, 3, 64).bfloat16()
    target = torch.full_like(source, torch.nan)
    report = copied(source, target, start, length, row, 2)
    assert report.clean, report
    expected = torch.full_like(source, torch.nan)
    rows = slice(start + row, start + max(row, min(length, row + ROWS)))
    expected[rows, 2] = source[rows, 2]
    np.testing.assert_array_equal(target.float(), expected.float())


def test_pages_with_heads_before_rows():
    source = torch.randn(6, 3, 16, 64).bfloat16().transpose(1, 2)
    target = torch.full_like(source, torch.nan)
    assert copied(source, target, 4, 11, 0, 1).clean
    expected = torch.full_like(source, torch.nan)
    expected[4, :11, 1] = source[4, :11, 1]
    np.testing.assert_array_equal(target.float(), expected.float())


@pytest.mark.parametrize(("start", "verb"), [(45, "reads bytes"), (-3, "reads bytes")])
def test_a_sequence_that_leaves_the_tensor_is_out_of_bounds(start, verb):
    source = torch.randn(50, 1, 64).bfloat16()
    report = copied(source, torch.zeros_like(source), start, 16, 0, 0)
    assert [finding.kind for finding in report.findings] == ["OutOfBounds", "OutOfBounds"]
    assert verb in str(report.findings[0])


def test_a_view_of_another_rank_is_refused():
    source = torch.randn(50, 1, 64).bfloat16()
    found = TensorDescriptor(source, BOX, (50, 1, 64), (64, 64, 1))
    args = {"source": found, "target": found, "start": 0, "length": 1, "row": 0, "head": 0, "step": 1, "unit": 1}
    with pytest.raises(SimulationError, match="its descriptor has 5 dimensions"):
        run(copy_kernel, (1,), args, layout=LAYOUT.value)
