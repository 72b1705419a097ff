"""Three kinds of buffers in the same CDNA kernel: values and findings, and what their configs say."""

from itertools import product

import numpy as np
import pytest

pytest.importorskip("triton")

from tests.drawn import drawn, each_once, in_turn
from tests.sim.builds import poison, run
from tests.sim.cdna.calls import ARCHS, SCHEDULES, Case, check, prefill_choice
from tests.sim.cdna.counts import outstanding, vm_instructions
from tests.sim.cdna.kernels import order_kernel
from warpattn.kernels.amd.kv_config import KINDS, KVBufferConfig
from warpattn.masks import Causal, Full
from warpattn.problem.element import BF16, FP8

both = pytest.mark.parametrize("arch", ARCHS)


MASKS = {"full": Full(), "causal": Causal()}
KERNELS = [(arch, kind, mask) for arch in ARCHS for kind in KINDS for mask in MASKS]
DRAWN = KERNELS[1:4:2] + KERNELS[10::2]  # causal on the one, full on the other


@pytest.mark.parametrize(("kernel", "schedule"), in_turn(KERNELS, DRAWN, [(name,) for name in SCHEDULES]), ids=str)
def test_values_under_every_schedule(kernel, schedule):
    arch, kind, mask = kernel
    call = Case(150, 200, dim=128, mask=MASKS[mask]).call()
    check(call, arch, prefill_choice(call, arch, kind), schedule=schedule)


@pytest.mark.parametrize(("slots", "arch"), drawn(product((2, 3, 4), ARCHS), each_once((3,), ARCHS[1:])))
def test_more_slots_load_further_ahead(arch, slots):
    call = Case(40, 300, dim=64, mask=Causal()).call()
    check(call, arch, prefill_choice(call, arch, "ring", slots=slots), schedule="adversarial")


STRIPS = list(product(("registers", "lds"), (16, 64), ARCHS))


@pytest.mark.parametrize(("kind", "strip", "arch"), drawn(STRIPS, [STRIPS[0], STRIPS[7]]))
def test_strips_of_any_width(arch, kind, strip):
    call = Case(40, 130, dim=64).call()
    check(call, arch, prefill_choice(call, arch, kind, k_strip=strip))


@pytest.mark.parametrize(
    ("operand", "tile", "axis", "second"), [("K", (128, 32), 1, (0, 32)), ("V", (32, 64), 0, (32, 0))]
)
def test_tiles_in_lds(operand, tile, axis, second):
    """Block tile and iterator axis, BN 128, BK 32, depth 64; where the second strip starts."""
    config = KVBufferConfig(operand, "lds", "gfx950", BF16, 128, 64, 64, 32, 1, 4, BF16)
    assert (config.btile, config.iterator_axis) == (tile, axis)
    assert (config.start(1, 0), config.start(1, 1)) == second
    assert config.strips == (2 if operand == "K" else 4)


def test_instructions_per_load():
    """Section 5.3: a 32 x 32 tile takes two instructions of 1 KiB with 16 bytes a lane, four times as many with 4."""
    wide = KVBufferConfig("K", "ring", "gfx950", BF16, 64, 128, 128, 128, 2, 4, BF16)
    assert vm_instructions(wide) == 2 * (64 * 128) // (32 * 32) // 4
    narrow = KVBufferConfig("K", "ring", "gfx942", BF16, 64, 128, 128, 128, 2, 4, BF16)
    assert vm_instructions(narrow) == 4 * vm_instructions(wide)
    assert outstanding(wide, wide) == 8 and outstanding(*[narrow] * 5) == 63, "vmcnt has 6 bits"


@both
@pytest.mark.parametrize("tiles", [1, 7, 8, 9, 64, 100])
def test_an_xcd_gets_consecutive_tiles(arch, tiles):
    """Workgroup w runs on XCD w % 8; the tiles of each XCD are a run, and each tile is taken once."""
    out = poison((tiles,), np.int32)
    assert run(order_kernel, (tiles,), {"out": out, "total": tiles}, arch=arch).clean
    xcds = (out % 8).tolist()
    assert sorted(out.tolist()) == list(range(tiles))
    assert xcds == sorted(xcds)


@pytest.mark.parametrize(("arch", "operand"), [("gfx942", "K"), ("gfx942", "V"), ("gfx950", "K")])
@pytest.mark.parametrize("strip", [32, 64, 128, 256])
def test_rows_start_at_different_banks(arch, operand, strip):
    """As many neighbouring rows as one cycle can serve, read at one column: all banks, each once."""
    kind = "registers" if operand == "V" else "ring"
    depth = strip if operand == "K" else 64
    config = KVBufferConfig(operand, kind, arch, BF16, 256, depth, depth, strip, 1, 4, BF16)
    banks = {"gfx942": 128, "gfx950": 256}[arch]  # bytes
    vector, per_phase, phases = config.swizzle
    size = 2 * vector
    at = {(row * 2 * strip + size * ((row // per_phase) % phases)) % banks for row in range(banks // size)}
    assert at == set(range(0, banks, size))


@pytest.mark.parametrize(
    ("operand", "kind", "arch", "stored", "strip", "tile", "lanes"),
    [
        ("K", "registers", "gfx942", BF16, 64, (1, 8), (8, 8)),  # 16 bytes a lane
        ("K", "registers", "gfx942", FP8, 64, (1, 16), (16, 4)),
        ("K", "ring", "gfx942", BF16, 256, (1, 2), (1, 64)),  # 4 bytes, half a row a wave
        ("K", "ring", "gfx950", BF16, 256, (1, 8), (2, 32)),
        ("V", "ring", "gfx942", BF16, 64, (1, 2), (1, 64)),
        ("V", "registers", "gfx950", BF16, 64, (1, 8), (4, 16)),
        ("V", "registers", "gfx942", BF16, 64, (4, 8), (4, 16)),  # 32 elements a lane: four keys of as many columns
        ("V", "registers", "gfx942", BF16, 32, (4, 4), (2, 32)),
        ("V", "registers", "gfx942", BF16, 128, (4, 8), (4, 16)),  # 64: a vector of columns at most
        ("V", "registers", "gfx942", BF16, 4, (4, 1), (1, 64)),  # 2: some lanes copy the same
    ],
)
def test_what_a_lane_copies(operand, kind, arch, stored, strip, tile, lanes):
    """Of tiles of 128 keys and columns, by 4 waves; V in registers of gfx942 is turned on its way."""
    config = KVBufferConfig(operand, kind, arch, BF16, 128, strip if operand == "K" else 128, 128, strip, 1, 4, stored)
    assert config.transposed == (tile[0] == 4)
    assert (config.lane_tile, config.lanes) == (tile, lanes)


@pytest.mark.parametrize(("columns", "scales"), [(0, 0), (64, 2), (128, 1)])
def test_scales_of_a_row(columns, scales):
    config = KVBufferConfig("V", "registers", "gfx950", BF16, 64, 128, 128, 64, 1, 4, FP8, columns)
    assert config.scales == scales


@pytest.mark.parametrize(
    ("operand", "kind", "arch", "strip", "swizzle"),
    [
        ("K", "ring", "gfx942", 32, (8, 2, 4)),  # two rows of 64 bytes are 128, one cycle
        ("K", "ring", "gfx942", 256, (8, 1, 8)),  # 8 vectors of 16 bytes in 128
        ("K", "ring", "gfx950", 32, (8, 4, 4)),
        ("V", "registers", "gfx942", 32, (4, 2, 8)),  # vectors of four keys
        ("V", "registers", "gfx942", 128, (4, 1, 16)),
        ("V", "ring", "gfx950", 64, (1, 1, 1)),  # turned while it is read
        ("V", "ring", "gfx942", 64, (1, 1, 1)),
    ],
)
def test_swizzles(operand, kind, arch, strip, swizzle):
    depth = strip if operand == "K" else 64
    assert KVBufferConfig(operand, kind, arch, BF16, 256, depth, depth, strip, 1, 4, BF16).swizzle == swizzle
