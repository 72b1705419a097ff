"""The cost model of sm_90 against what an H200 took (SM cycles by ncu), and prices of single operations."""

from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("triton")

from bench.model import __main__ as model
from bench.model import problems
from bench.model.predict import predict
from tests.drawn import drawn
from warpattn.sim.errors import SimulationError
from warpattn.sim.ir.module import parse_module
from warpattn.sim.timing.bandwidth import SLICE, Bandwidth
from warpattn.sim.timing.cost import CHIPS, SM90, chip_of, prices, product

TEXT = """module attributes {{"ttg.num-warps" = 4 : i32, ttg.target = "cuda:90"}} {{
tt.func public @k(%x: tensor<64x128xf32>, %y: tensor<64x128xf32>, %n: i32) {{
{op}
tt.return
}}
}}
"""


def price(*ops):
    block = parse_module(TEXT.format(op="\n".join(ops))).functions["k"]
    table = prices(block, SM90)
    return [table.get(op.uid) for op in block.ops[:-1]]


# One of each kernel and mask; `python -m bench.model` shows all.
CASES = ("d128-1x16k-full", "d128-16x1k-causal", "d64-1x16k-full", "d64-16x1k-causal", "d256-2x8k-full",
         "d256-4x4k-causal", "gqa-4x4k-causal", "window-1x16k-1024", "32x1 over 4096 heads 32/8 dim 128/128 full",
         "backward 4x4096 heads 16/16 dim 128/128 full", "backward 4x4096 heads 32/32 dim 64/64 causal")  # fmt: skip
DRAWN = ("d128-16x1k-causal", "32x1 over 4096 heads 32/8 dim 128/128 full")


@pytest.mark.parametrize("name", drawn(CASES, DRAWN))
def test_predicted_cycles(name):
    assert predict(problems.find(name)).cycles / model.measured()[name] == pytest.approx(1, abs=model.CLOSE)


def test_predictions_made_before_measuring_are_as_the_page_says():
    found, made = model.measured(), model.written()
    assert {problem.name for problem in problems.HELD_OUT} == made.keys() and len(made) >= 12
    off = model.errors(cycles / found[name] for name, cycles in made.items())
    page = (Path(__file__).parents[4] / "docs" / "simulator.md").read_text(encoding="utf-8")
    said = f"{off.count} problems, {100 * off.close:.0f} % within 25 %, median error {100 * off.median:.1f} %"
    assert said in page and off.close >= 0.9 and off.median <= 0.08


@pytest.mark.parametrize(
    ("op", "engines", "latency"),
    [
        ("%a = math.exp2 %x : tensor<64x128xf32>", {"issue": 64, "MUFU": 512}, 4),
        ("%a = arith.addf %x, %y : tensor<64x128xf32>", {"issue": 64}, 4),
        ("%a = arith.maxnumf %x, %y : tensor<64x128xf32>", {"issue": 64, "ALU": 128}, 4),
        ("%a = arith.addi %n, %n : i32", {}, 6),
        ("%a = arith.divsi %n, %n : i32", {}, 90),
    ],
)
def test_prices(op, engines, latency):
    found = price(op)[0]
    assert dict(found.engines) == engines and found.latency == latency


def test_a_multiplication_that_is_only_added_is_part_of_the_addition():
    multiply, add = "%a = arith.mulf %x, %y : tensor<64x128xf32>", "%b = arith.subf %a, %y : tensor<64x128xf32>"
    first, second = price(multiply, add)
    assert first is None and second is not None
    first, *_ = price(multiply, add, "%c = arith.addf %a, %x : tensor<64x128xf32>")
    assert first is not None


def test_a_division_by_a_constant_is_none():
    constant, division = "%c = arith.constant 3 : i32", "%a = arith.divsi %n, %c : i32"
    assert price(constant, division)[1].latency < SM90.latencies["integer division"] / 3


def test_a_chip_without_a_model_is_an_error():
    with pytest.raises(SimulationError, match="no cost model for cuda:75"):
        chip_of("cuda:75")


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
def test_every_number_has_a_source(chip):
    assert chip.sources and all(rate > 0 for rate in chip.rates.values())


SHARED = "!ttg.memdesc<{0}x{1}xbf16, #shared, #smem>"


@pytest.mark.parametrize(
    ("rows", "columns", "registers", "cycles", "read"),
    [
        (64, 128, False, 256, 64 * 64 + 128 * 64),  # of elements of two bytes
        (64, 128, True, 256, 128 * 64),
        (64, 64, False, 128, 2 * 64 * 64),  # as many bytes as shared memory has in that time
        (128, 128, False, 512, 128 * 64 + 2 * 128 * 64),  # each 64 rows read all columns
    ],
)
def test_a_product_reads_its_operands_of_shared_memory(rows, columns, registers, cycles, read):
    left = f"tensor<{rows}x64xbf16>" if registers else SHARED.format(rows, 64)
    result = f"tensor<{rows}x{columns}xf32>"
    right = SHARED.format(64, columns)
    op = f"%a = ttng.warp_group_dot %p, %q, %r {{inputPrecision = 0 : i32}} : {left} * {right} -> {result}"
    block = parse_module(TEXT.format(op=op)).functions["k"]
    engines = dict(product(block.ops[0], SM90).engines)
    assert engines == {"tensor core": cycles + 16 * registers, "shared memory": 2 * read / 128}


def test_what_is_left_of_shared_memory_goes_to_others():
    banks = Bandwidth()
    first = banks.draw(0.0, 96.0, rate=0.75)  # three quarters of it for 128 cycles
    second = banks.draw(0.0, 48.0)
    assert first.end == 128 and 128 < second.end <= 3 * SLICE
    pieces = sorted(first.pieces + second.pieces)
    assert sum(end - start for start, end in pieces) == pytest.approx(144)
    assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(pieces))


def test_a_request_is_served_no_faster_than_its_rate():
    assert Bandwidth().draw(10.0, 50.0, rate=0.5).end == pytest.approx(110)
    assert Bandwidth().draw(10.0, 50.0).end == pytest.approx(60)
