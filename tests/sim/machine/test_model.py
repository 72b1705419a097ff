"""The cost model of sm_90 against what an H200 took (SM cycles by ncu), and prices of single operations."""

import pytest

pytest.importorskip("triton")

from bench import sim
from bench.cases import find
from tests.drawn import drawn
from warpattn.sim.errors import SimulationError
from warpattn.sim.ir.module import parse_module
from warpattn.sim.timing.cost import CHIPS, SM90, chip_of, prices

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


# One of each kernel and mask; `python -m bench.sim` shows all.
CASES = ("d128-1x16k-full", "d128-16x1k-causal", "d64-1x16k-full", "d64-16x1k-causal", "d64-4x4k-causal",
         "d256-2x8k-full", "d256-4x4k-causal", "gqa-4x4k-causal")  # fmt: skip


DRAWN = ("d128-16x1k-causal", "d64-1x16k-full", "d256-2x8k-full", "gqa-4x4k-causal")


@pytest.mark.parametrize("name", drawn(CASES, DRAWN))
def test_predicted_cycles(name):
    assert sim.predict(find(name)) / sim.measured()[name] == pytest.approx(1, abs=sim.CLOSE)


@pytest.mark.parametrize(
    ("op", "engines", "latency"),
    [
        ("%a = math.exp2 %x : tensor<64x128xf32>", {"issue": 64, "MUFU": 512}, 4),
        ("%a = arith.addf %x, %y : tensor<64x128xf32>", {"issue": 64}, 4),
        ("%a = arith.maxnumf %x, %y : tensor<64x128xf32>", {"issue": 64, "ALU": 128}, 4),
        ("%a = arith.addi %n, %n : i32", {}, 2),
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
    assert price(constant, division)[1].latency < 10


def test_a_chip_without_a_model_is_an_error():
    with pytest.raises(SimulationError, match="no cost model for cuda:75"):
        chip_of("cuda:75")


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
def test_every_number_has_a_source(chip):
    assert chip.sources and all(rate > 0 for rate in chip.rates.values())
