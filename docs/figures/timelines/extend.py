"""The kernel of docs/extend.md: out = a·bᵀ on Hopper, from this project's ring of tiles, and its run in the simulator.

load_role   acquire slot ─▶ TMA a, TMA b ─▶ [ a b ][ a b ][ a b ] ─▶ wait ─▶ wgmma ─▶ release   multiply_role
"""

from pathlib import Path
from typing import Any

import numpy as np
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from docs.figures.timelines.simulated import timeline
from warpattn.kernels.nvidia.pipelines import consumer_state, make_pipeline, producer_state
from warpattn.sim import Report, TensorDescriptor, compile_for, simulate

TILE = gl.constexpr(64)
STAGES = gl.constexpr(3)


@gluon.jit
def load_role(a_desc, b_desc, ring, depth):
    """Feed the tiles of one block of rows of a and one of b, in the order of the depth."""
    state = producer_state(STAGES)
    for k in range(0, depth, TILE):
        full = ring.producer_acquire(state)
        mbarrier.expect(full, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        tma.async_load(a_desc, [gl.program_id(0) * TILE, k], full, ring.tile(state, 0))
        tma.async_load(b_desc, [gl.program_id(1) * TILE, k], full, ring.tile(state, 1))
        state = state.step()


@gluon.jit
def multiply_role(out, columns, ring, depth):
    """Multiply what arrives, and write the block of the result."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    total = gl.zeros([TILE, TILE], gl.float32, layout)
    state = consumer_state(STAGES)
    for _ in range(0, depth, TILE):
        ring.consumer_wait(state)
        product = warpgroup_mma(ring.tile(state, 0), ring.tile(state, 1).permute((1, 0)), total, is_async=True)
        total = warpgroup_mma_wait(0, deps=(product,))
        ring.consumer_release(state)
        state = state.step()
    rows = gl.program_id(0) * TILE + gl.arange(0, TILE, gl.SliceLayout(1, layout))
    cols = gl.program_id(1) * TILE + gl.arange(0, TILE, gl.SliceLayout(0, layout))
    gl.store(out + rows[:, None] * columns + cols[None, :], total)


@gluon.jit
def product_kernel(a_desc, b_desc, out, columns, depth):
    """out [rows, columns] fp32 = a [rows, depth] · b [columns, depth]ᵀ, one block of 64 × 64 a program."""
    smem = gl.allocate_shared_memory(gl.float16, [STAGES * 2, TILE, TILE], a_desc.layout)
    ring = make_pipeline(smem, arrivals=4, stages=STAGES, parts=2)
    gl.warp_specialize(
        [(multiply_role, (out, columns, ring, depth)), (load_role, (a_desc, b_desc, ring, depth))], [1], [24]
    )


def compiled(machine_code: bool = False) -> Any:
    """The kernel for Hopper."""
    tile = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    desc = f"tensordesc<fp16[64, 64],{tile!r}>"
    signature = {"a_desc": desc, "b_desc": desc, "out": "*fp32", "columns": "i32", "depth": "i32"}
    return compile_for("sm90", product_kernel, signature, machine_code=machine_code)


def run(kernel: Any = None, schedule: str = "eager", seed: int = 0, timing: bool = False) -> tuple[Report, float]:
    """(report, largest error) of a product of 128 × 320 with 192 × 320; kernel: None for `compiled()`."""
    random = np.random.default_rng(seed)
    a, b = (random.standard_normal((rows, 320)).astype(np.float16) for rows in (128, 192))
    out = np.full((128, 192), np.nan, np.float32)
    tiles = {"a_desc": TensorDescriptor(a, (64, 64)), "b_desc": TensorDescriptor(b, (64, 64))}
    args = {**tiles, "out": out, "columns": 192, "depth": 320}
    report = simulate(kernel or compiled(), (2, 3), args, schedule=schedule, seed=seed, timing=timing)
    return report, float(np.abs(out - a.astype(np.float32) @ b.astype(np.float32).T).max())


def files() -> dict[Path, str]:
    """The timeline of the first program."""
    return {Path(__file__).with_name("extend.svg"): timeline(run(timing=True)[0])}
