"""What reading keys and values alone takes: the decode kernel's copies in the decode kernel's order, and nothing else.

Every CTA has one run of key tiles, and asks for the next one as soon as one has arrived. No attention over these keys
can be expected to take less, launch included; the rest of a decode step is the kernel's own doing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import GluonASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from warpattn.kernels.nvidia.pipelines import make_pipeline, producer_state
from warpattn.kernels.sm90.layouts import tile_layout
from warpattn.problem.launch import Launch

TILE = 128  # keys
STAGES = 2  # one is as fast, three are too (bench/notes.md)
CTAS = 128


@gluon.jit
def read_kernel(k, v, heads, tiles, total, tile_n: gl.constexpr, dim: gl.constexpr, stages: gl.constexpr):
    """Copy `total` tiles of k and v, descriptors of (batch, keys, `heads`, dim) with `tiles` tiles a head."""
    layout: gl.constexpr = tile_layout(tile_n, dim, gl.bfloat16)
    k_ring = make_pipeline(gl.allocate_shared_memory(gl.bfloat16, [stages, 1, tile_n, 1, dim], layout), 4, stages)
    v_ring = make_pipeline(gl.allocate_shared_memory(gl.bfloat16, [stages, 1, tile_n, 1, dim], layout), 4, stages)
    size = (total + gl.num_programs(0) - 1) // gl.num_programs(0)
    begin = gl.program_id(0) * size
    end = gl.minimum(begin + size, total)
    state = producer_state(stages)
    for tile in range(begin, end):
        head = tile // tiles
        coord = [head // heads, (tile - head * tiles) * tile_n, head % heads, 0]
        load_next(k, k_ring, state, coord, 2 * tile_n * dim)
        load_next(v, v_ring, state, coord, 2 * tile_n * dim)
        state = state.step()
    for _ in gl.static_range(stages):
        mbarrier.wait(k_ring.full(state.index), state.phase)
        mbarrier.wait(v_ring.full(state.index), state.phase)
        state = state.step()


@gluon.jit
def load_next(desc, ring, state, coord, nbytes: gl.constexpr):
    """A tile into a slot, as soon as its previous copy has arrived."""
    mbarrier.wait(ring.full(state.index), state.phase)
    mbarrier.expect(ring.full(state.index), nbytes)
    tma.async_load(desc, coord, ring.full(state.index), ring.tile(state))


def read_step(k: Tensor, v: Tensor) -> Launch:
    """The launch that reads bf16 (batch, keys, heads, dim) tensors, a multiple of 128 keys."""
    batch, keys, heads, dim = k.shape
    if k.dtype != torch.bfloat16 or keys % TILE or v.shape != k.shape:
        raise ValueError(f"k is {k.dtype}, {keys} keys, v {tuple(v.shape)}: bfloat16, one shape, {TILE} keys a tile")
    tiles = keys // TILE
    args = {"k": k, "v": v, "heads": heads, "tiles": tiles, "total": batch * heads * tiles}

    def source() -> Any:
        descriptor = f"tensordesc<bf16[1, {TILE}, 1, {dim}],{tile_layout(TILE, dim, gl.bfloat16)!r}>"
        constants = {"tile_n": TILE, "dim": dim, "stages": STAGES}
        numbers = dict.fromkeys(("heads", "tiles", "total"), "i32")
        signature = {"k": descriptor, "v": descriptor, **numbers, **dict.fromkeys(constants, "constexpr")}
        return GluonASTSource(read_kernel, signature, constants, {})

    options = {"num_warps": 1, "enable_fp_fusion": True}
    return Launch("bench.read", "sm90", (TILE, dim, STAGES), source, options, (CTAS,), args, persistent=1)
