"""Three kinds of buffers in the same CDNA kernel: values, findings, and which waits are needed."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from tests.sim.builds import poison, run
from tests.sim.cdna import ARCHS, SCHEDULES, Case, check, outputs, prefill_choice, ready_of
from tests.sim.cdna_kernels import order_kernel
from warpattn.kernels.amd.kv_config import KINDS, KVBufferConfig, outstanding
from warpattn.kernels.cdna.steps import steps
from warpattn.masks import Causal, Full
from warpattn.operands import Operands, fitted
from warpattn.sim import Report, knock_out, simulate
from warpattn.sim.compile import to_ttgir
from warpattn.step import Step

both = pytest.mark.parametrize("arch", ARCHS)
every = pytest.mark.parametrize("kind", KINDS)


@both
@every
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mask", [Full(), Causal()], ids=["full", "causal"])
def test_values_under_every_schedule(arch, kind, schedule, mask):
    call = Case(150, 200, dim=128, mask=mask).call()
    check(call, arch, prefill_choice(call, arch, kind), schedule=schedule)


@both
@pytest.mark.parametrize("slots", [2, 3, 4])
def test_more_slots_load_further_ahead(arch, slots):
    call = Case(40, 300, dim=64, mask=Causal()).call()
    check(call, arch, prefill_choice(call, arch, "ring", slots=slots), schedule="adversarial")


@both
@pytest.mark.parametrize(("kind", "strip"), [("registers", 16), ("registers", 64), ("lds", 16), ("lds", 64)])
def test_strips_of_any_width(arch, kind, strip):
    call = Case(40, 130, dim=64).call()
    check(call, arch, prefill_choice(call, arch, kind, k_strip=strip))


class Bench:
    """One problem whose kernel is compiled once and run changed."""

    def __init__(self, arch: str, kind: str) -> None:
        self.call = Case(40, 300, dim=64, mask=Causal()).call()
        self.ready = ready_of(self.call, arch)
        self.choice = prefill_choice(self.call, arch, kind)
        self.kernel = launch_kernel(self.step())

    def step(self) -> Step:
        """The launch, with a fresh output."""
        call = self.call
        fitting = fitted(Operands(call.q, call.k, call.v, *outputs(call, self.ready), None))
        return steps(self.ready, fitting, call.sequence, self.choice)[0]

    def run(self, kernel: Any) -> Report:
        """The first report with findings under two schedules, or a clean one."""
        report = Report()
        for schedule in ("lazy", "adversarial"):
            step = self.step()
            report = simulate(kernel, step.grid, step.args, schedule, step_limit=20_000)
            if not report.clean:
                break
        return report


@both
@pytest.mark.parametrize("kind", ["lds", "ring"])
def test_waits_are_needed(arch, kind):
    """Without any one of the waits and commits something is found: none of them is redundant."""
    bench = Bench(arch, kind)
    results = knock_out(bench.kernel, bench.run)
    waits = [found.noticed for found in results if found.op == "ttg.async_wait"]
    assert waits == [True] * (4 if kind == "lds" else 3)
    assert not [str(found) for found in results if not found.noticed]


@both
@pytest.mark.parametrize("groups", [1, 2])
def test_a_wait_that_is_looser_by_one_is_found(arch, groups):
    """The ring waits for all but one group before it reads K, all but two before V."""
    bench = Bench(arch, "ring")
    text = bench.kernel.asm["ttgir"]
    wait = f"ttg.async_wait {{num = {groups} : i32}}"
    assert text.count(wait) == 1
    assert bench.run(text).clean
    report = bench.run(text.replace(wait, wait.replace(str(groups), str(groups + 1), 1)))
    assert not report.clean


def launch_kernel(step: Step) -> Any:
    from triton.backends.compiler import GPUTarget

    return to_ttgir(step.source(), GPUTarget("hip", step.arch, 64), dict(step.options))


@pytest.mark.parametrize(
    ("operand", "tile", "wave", "coordinate", "axis"),
    [("K", (128, 32), (32, 32), (3, 0), 1), ("V", (32, 64), (32, 16), (0, 3), 0)],
)
def test_tiles_of_the_specification(operand, tile, wave, coordinate, axis):
    """Section 5.1: block tile, warp tile, coordinates and iterator axis, BN 128, BK 32, WN 32, depth 64."""
    config = KVBufferConfig(operand, "lds", "gfx950", 128, 64, 64, 32, 1, 4, 4)
    assert (config.btile, config.wtile, config.iterator_axis) == (tile, wave, axis)
    assert config.get_wtile_coord(3) == coordinate
    assert config.strips == (2 if operand == "K" else 4)


def test_instructions_per_load():
    """Section 5.3: a 32 x 32 tile takes two instructions of 1 KiB with 16 bytes a lane, four times as many with 4."""
    wide = KVBufferConfig("K", "ring", "gfx950", 64, 128, 128, 128, 2, 4)
    assert wide.vm_instrs_per_load == 2 * (64 * 128) // (32 * 32) // 4
    narrow = KVBufferConfig("K", "ring", "gfx942", 64, 128, 128, 128, 2, 4)
    assert narrow.vm_instrs_per_load == 4 * wide.vm_instrs_per_load
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
    config = KVBufferConfig(operand, kind, arch, 256, depth, depth, strip, 1, 4)
    banks = {"gfx942": 128, "gfx950": 256}[arch]  # bytes
    vector, per_phase, phases = config.swizzle
    size = 2 * vector
    at = {(row * 2 * strip + size * ((row // per_phase) % phases)) % banks for row in range(banks // size)}
    assert at == set(range(0, banks, size))
