"""The example of docs/simulator.md: tiles through a ring of two slots, and its timeline.

load_role   wait empty[slot] ─▶ TMA load ─▶ [ slot 0 ][ slot 1 ] ─▶ wait full[slot] ─▶ add up   sum_role
"""

from pathlib import Path

import numpy as np
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from docs.figures.timelines.simulated import timeline
from warpattn.sim import Report, TensorDescriptor, compile_for, simulate

TILE = gl.constexpr(64)


@gluon.jit
def load_role(x_desc, ring, full, empty, tiles):
    """Load every tile into the slot whose turn it is."""
    for i in range(tiles):
        slot = i % 2
        mbarrier.wait(empty.index(slot), ((i // 2) & 1) ^ 1)
        mbarrier.expect(full.index(slot), x_desc.block_type.nbytes)
        tma.async_load(x_desc, [i * TILE, 0], full.index(slot), ring.index(slot))


@gluon.jit
def sum_role(out, ring, full, empty, tiles, early: gl.constexpr):
    """Add up the tiles; with `early` a slot is given back before it has been read."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    total = gl.zeros([TILE, TILE], gl.float32, layout)
    for i in range(tiles):
        slot = i % 2
        mbarrier.wait(full.index(slot), (i // 2) & 1)
        if early:
            mbarrier.arrive(empty.index(slot), count=1)
        total += ring.index(slot).load(layout).to(gl.float32)
        if not early:
            mbarrier.arrive(empty.index(slot), count=1)
    rows = gl.arange(0, TILE, gl.SliceLayout(1, layout))
    cols = gl.arange(0, TILE, gl.SliceLayout(0, layout))
    gl.store(out + rows[:, None] * TILE + cols[None, :], total)


@gluon.jit
def sum_kernel(x_desc, out, tiles, early: gl.constexpr):
    """out [64, 64] = sum of the `tiles` tiles of x [tiles * 64, 64]."""
    ring = gl.allocate_shared_memory(gl.float16, [2, TILE, TILE], x_desc.layout)
    full = mbarrier.allocate_mbarrier(batch=2)
    empty = mbarrier.allocate_mbarrier(batch=2)
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize(
        [(sum_role, (out, ring, full, empty, tiles, early)), (load_role, (x_desc, ring, full, empty, tiles))], [1], [24]
    )


def run(early: bool, tiles: int = 6, **options) -> tuple[Report, float]:
    """(report, largest error) of the kernel on random tiles; options of `simulate`."""
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    signature = {"x_desc": f"tensordesc<fp16[64, 64],{layout!r}>", "out": "*fp32", "tiles": "i32", "early": "constexpr"}
    kernel = compile_for("sm90", sum_kernel, signature, {"early": early})
    x = np.random.default_rng(0).standard_normal((tiles * 64, 64)).astype(np.float16)
    out = np.full((64, 64), np.nan, np.float32)
    args = {"x_desc": TensorDescriptor(x, (64, 64)), "out": out, "tiles": tiles}
    report = simulate(kernel, (1,), args, **options)
    return report, float(np.abs(out - x.astype(np.float32).reshape(tiles, 64, 64).sum(0)).max())


def files() -> dict[Path, str]:
    """The timeline of the correct kernel."""
    return {Path(__file__).with_name("ring.svg"): timeline(run(early=False, timing=True)[0])}
