"""Epilogue of Hopper's backward: stores dV and dK of 64 keys by TMA."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ...nvidia.clipped_rows import stacked, tile_box
from ...nvidia.pipelines import PipelineState
from ..column_slices import columns_of
from ..layouts import element_type


@gluon.jit
def staging(ctx, state, wg: gl.constexpr):
    """A tile [1, 64, 1, D] for the warpgroup's dV and dK: its part of V, which it alone reads, or of the dS slot of a
    consumer's `state`, once `reduce` has read that."""
    config: gl.constexpr = ctx.config
    if config.stages_in_ds:
        acquire(ctx.rings.ds, state)
        return tiles_in(ctx.rings.ds.tile(state, wg), config.block_m // config.padded, config.padded, config).index(0)
    else:
        return ctx.rings.v.smem.index(wg)


@gluon.jit
def acquire(ring, state):
    """Waits until a slot is empty, as a producer, but with the `state` of a consumer."""
    ring.producer_acquire(PipelineState(state.index, state.phase ^ 1, state.stages))


@gluon.jit
def store_keys(ctx, rows, sums, widths: gl.constexpr, smem, part: gl.constexpr):
    """Stores sums [64, D], given in parts of the columns, to the CTA's keys from `part` on. TMA clips keys and
    columns past the end."""
    keys = ctx.keys
    dtype: gl.constexpr = element_type(ctx.config.element)
    cols: gl.constexpr = smem.shape[-1]
    tile = smem.reshape([ctx.config.rows, cols])
    for i in gl.static_range(len(widths)):
        columns_of(tile, widths, i).store(sums[i].to(dtype))
    fence_async_shared()
    gl.barrier()
    rows.store(keys.k_start, keys.seq_k, keys.first + part, keys.h, 0, smem)


@gluon.jit
def store_boxes(ctx, dv, dk, wg: gl.constexpr):
    """Stores dV and dK of the warpgroup's 64 keys in parts of 64 columns, alternately through the two halves of
    its dQ buffer. The next write to that buffer waits for them."""
    halves = half_tiles(ctx, wg)
    wait_copies()  # of dQ
    for i in gl.static_range(len(dv)):
        store_box(ctx, ctx.tensors.dv, dv[i], halves.index(i % 2), i, wg)
    for i in gl.static_range(len(dk)):
        store_box(ctx, ctx.tensors.dk, dk[i], halves.index((len(dv) + i) % 2), i, wg)


@gluon.jit
def store_box(ctx, rows, sums, smem, number: gl.constexpr, wg: gl.constexpr):
    """Stores one part, once TMA has read what its half of the buffer held."""
    keys = ctx.keys
    cols: gl.constexpr = smem.shape[-1]
    tma.store_wait(1)
    gl.barrier()
    smem.reshape([ctx.config.rows, cols]).store(sums.to(element_type(ctx.config.element)))
    fence_async_shared()
    gl.barrier()
    rows.store(keys.k_start, keys.seq_k, keys.first + wg * ctx.config.rows, keys.h, number * cols, smem)


@gluon.jit
def half_tiles(ctx, wg: gl.constexpr):
    """A warpgroup's dQ buffer, viewed as two tiles of dV or dK with 64 columns each."""
    return tiles_in(ctx.rings.dq.index(wg), 2, ctx.config.dq_cols, ctx.config)


@gluon.jit
def tiles_in(smem, count: gl.constexpr, cols: gl.constexpr, config: gl.constexpr):
    """Shared memory viewed as `count` tiles of the warpgroup's keys with `cols` columns, as TMA stores them."""
    dtype: gl.constexpr = element_type(config.element)
    box: gl.constexpr = tile_box(config.rows, cols, config.ragged)
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(box, dtype)
    return smem.reinterpret(dtype, stacked(count, box), layout)


@gluon.jit
def wait_copies():
    """Waits until TMA has read all that is being stored: its memory may be overwritten."""
    tma.store_wait(0)
    gl.barrier()
