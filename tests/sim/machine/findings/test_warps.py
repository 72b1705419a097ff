"""Warps of one role that meet in global memory or in assembly's stores need a barrier, which Triton does not insert."""

import linecache
import re

import numpy as np
import pytest

pytest.importorskip("triton")

from triton.experimental.gluon import language as gl

from tests.sim.builds import build, poison
from tests.sim.machine.kernels.gluon import STORE_WORDS, own_words_kernel
from tests.sim.machine.kernels.pointer import between_warps_kernel
from warpattn.sim import Report, TensorDescriptor, compile_for, simulate, whole

N = 1024
ARCHS = ["sm90", "sm100", "gfx942", "gfx950"]
RACES = {  # mode: what the later access and the earlier one do
    "flip": ("tl.store(x + i", "tl.load(x + N"), "rounds": ("tl.load(x + i)", "tl.store(x + (i ^ N"),
    "one": ("tl.load(x + N - 1)", "tl.store(x + i"),
}  # fmt: skip


def simulated(mode: str, arch: str, num_warps: int = 8) -> Report:
    args = {"x": np.arange(N, dtype=np.float32), "out": poison(N)}
    constants = {"N": N, "MODE": mode}
    kernel = build(between_warps_kernel, args, constants, arch=arch, num_warps=num_warps)
    return simulate(kernel, (1,), args, schedules="all")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("mode", RACES)
def test_a_race_between_warps(mode, arch):
    (found,) = simulated(mode, arch).findings
    assert found.kind == "Race" and found.buffer == "x" and "another warp" in found.message
    lines = [linecache.getline(*place.frames[0]) for place in found.places]
    assert all(text in line for text, line in zip(RACES[mode], lines, strict=True))
    assert simulated(mode, arch, num_warps=1).clean


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("mode", ["flip, barrier", "in place", "few in place", "sum"])
def test_no_race_between_warps(mode, arch):
    report = simulated(mode, arch)
    assert report.clean, report


def test_the_compiler_inserts_no_barrier():
    types = {"x": "*fp32", "out": "*fp32", "N": "constexpr", "MODE": "constexpr"}
    made = [compile_for("sm90", between_warps_kernel, types, {"N": N, "MODE": mode}, 8, machine_code=True)
            for mode in ("flip", "flip, barrier")]  # fmt: skip
    assert [kernel.asm["ptx"].count("bar.sync") for kernel in made] == [0, 1]


@whole(re.escape(STORE_WORDS.value) + "$")
def store_words(role, match, tile, words):
    tile.buffer.write(role.store_apart(tile), role.clock, words.astype(np.uint32))
    return None
    yield


@pytest.mark.parametrize(
    ("fence", "barrier", "rows", "kinds"),
    [(1, 1, 32, []), (1, 0, 32, ["Race"]), (0, 1, 32, ["MissingFence"]), (0, 0, 64, [])],
)
def test_stores_by_assembly(fence, barrier, rows, kinds):
    args = {"out": TensorDescriptor(np.full((rows, 4), -1, np.int32), (rows, 4))}
    types = {"out": f"tensordesc<i32[{rows}, 4],{gl.NVMMASharedLayout(0, 32, 2)!r}>"}
    types |= {"FENCE": "constexpr", "BARRIER": "constexpr"}
    kernel = compile_for("sm90", own_words_kernel, types, {"FENCE": fence, "BARRIER": barrier}, machine_code=True)
    report = simulate(kernel, (1,), args, schedules="all")
    assert [found.kind for found in report.findings] == kinds, report
    before = kernel.asm["ptx"].partition("cp.async.bulk.tensor")[0]
    found = [before.count(text) for text in ("fence.proxy.async", "bar.sync")]
    assert found == ([fence, barrier] if rows == 32 else [1, 1])
