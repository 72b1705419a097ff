"""P·V as one product of any number of columns, written in assembly: values, and what the simulator finds in it."""

from typing import NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from triton.compiler.errors import CompilationError
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from tests.sim.builds import build, poison, run
from warpattn.kernels.pieces.softmax import as_quads, pack
from warpattn.kernels.sm90.column_slices import columns_before
from warpattn.kernels.sm90.columns import zero_columns
from warpattn.kernels.sm90.exact_columns import add_product
from warpattn.kernels.sm90.layouts import accumulator_layout
from warpattn.kernels.sm90.prefill.exact_values import widths_of
from warpattn.problem.element import Element, element_of
from warpattn.sim import SimulationError, simulate
from warpattn.sim.compile import Compiled

KEYS = gl.constexpr(64)
RNG = np.random.default_rng(0)


@gluon.jit
def store_part(out, part, columns: gl.constexpr):
    """Stores [64, width] to rows of `columns` columns."""
    row = gl.arange(0, 64, gl.SliceLayout(1, part.type.layout))[:, None]
    gl.store(out + row * columns + gl.arange(0, part.shape[1], gl.SliceLayout(0, part.type.layout))[None, :], part)


class Product(NamedTuple):
    """A product of `times` additions; only the first `filled` boxes of V are written, one is every `step` tiles."""

    widths: tuple[int, ...]
    boxes: int
    box: int
    element: Element
    filled: int
    times: int = 1
    waits: bool = True
    step: int = 1


@gluon.jit
def product_kernel(p, v, out, CASE: gl.constexpr):
    """out [64, columns] = times · P [64, KEYS] · V [KEYS, boxes · box], see `Product`."""
    dtype: gl.constexpr = v.dtype.element_ty
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, CASE.box], dtype)
    smem = gl.allocate_shared_memory(dtype, [CASE.boxes * CASE.step, KEYS, CASE.box], layout)
    key = gl.arange(0, KEYS, gl.SliceLayout(1, rows))[:, None]
    col = gl.arange(0, CASE.box, gl.SliceLayout(0, rows))[None, :]
    boxes = ()
    for i in gl.static_range(CASE.boxes):
        boxes += (smem.index(i * CASE.step),)
        if i < CASE.filled:
            smem.index(i * CASE.step).store(gl.load(v + key * (CASE.boxes * CASE.box) + i * CASE.box + col))
    fence_async_shared()
    gl.barrier()
    own: gl.constexpr = accumulator_layout(KEYS)
    row = gl.arange(0, 64, gl.SliceLayout(1, own))[:, None]
    weights = gl.load(p + row * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, own))[None, :]).to(gl.float32)
    pairs = pack(as_quads(weights), dtype)
    o = zero_columns(64, CASE.widths)
    for _ in gl.static_range(CASE.times):
        o = add_product(o, pairs, boxes, CASE.widths, CASE.element)
    if CASE.waits:
        o = warpgroup_mma_wait(0, deps=o)
    columns: gl.constexpr = columns_before(CASE.widths, len(CASE.widths))
    for i in gl.static_range(len(CASE.widths)):
        store_part(out + columns_before(CASE.widths, i), o[i], columns)


def arguments(columns, dtype=torch.bfloat16, box=64, **changed):
    """(arguments, constants) of a product."""
    boxes = -(-columns // box)
    p, v = (torch.from_numpy(RNG.standard_normal(shape)).to(dtype) for shape in ((64, 64), (64, boxes * box)))
    case = Product(widths_of(columns), boxes, box, element_of(dtype), boxes)._replace(**changed)
    return {"p": p, "v": v, "out": torch.from_numpy(poison((64, columns)))}, {"CASE": case}


@pytest.mark.parametrize(
    ("columns", "dtype", "box"),
    [(72, torch.float16, 64), (80, torch.bfloat16, 64), (40, torch.bfloat16, 64), (208, torch.float16, 64),
     (240, torch.bfloat16, 64), (112, torch.bfloat16, 128)],
)  # fmt: skip
@pytest.mark.parametrize("schedule", ["eager", "lazy"])
def test_a_product_has_exactly_its_columns(columns, dtype, box, schedule):
    args, constants = arguments(columns, dtype, box, times=2)
    args["v"][:, columns:] = float("nan")  # the padding is not multiplied
    assert run(product_kernel, (1,), args, constants, schedule=schedule).clean
    expected = 2 * args["p"].float() @ args["v"][:, :columns].float()
    torch.testing.assert_close(args["out"], expected, rtol=1e-4, atol=1e-4)


def test_a_result_that_is_not_waited_for_is_a_race():
    report = run(product_kernel, (1,), *arguments(80, waits=False), schedule="lazy")
    assert [finding.kind for finding in report.findings][:1] == ["Race"]


def test_values_that_were_never_written_are_found():
    report = run(product_kernel, (1,), *arguments(80, filled=1))
    assert [finding.kind for finding in report.findings][:1] == ["UninitialisedRead"]


def test_boxes_of_another_swizzle_are_refused():
    with pytest.raises(CompilationError) as refused:
        run(product_kernel, (1,), *arguments(80, box=32))
    assert "the descriptor of V says so" in str(refused.value.__cause__)


def test_boxes_with_a_gap_are_not_simulated():
    with pytest.raises(SimulationError, match="not one after the other"):
        run(product_kernel, (1,), *arguments(80, step=2))


@pytest.mark.parametrize(
    ("text", "other"),
    [("m64n80k16", "m64n72k16"), ("$2, $3", "$3, $2"), ("v, v, 128;", "v, v, 64;"), (", 4, 14", ", 4, 13")],
)
def test_another_order_of_operands_is_not_simulated(text, other):
    """It would give other values on a card."""
    args, constants = arguments(80)
    ttgir = build(product_kernel, args, constants).asm["ttgir"]
    assert text in ttgir
    with pytest.raises(SimulationError, match="another descriptor or order"):
        simulate(Compiled("product", {"ttgir": ttgir.replace(text, other)}), (1,), args)
