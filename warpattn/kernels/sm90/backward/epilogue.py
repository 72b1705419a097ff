"""dV or dK of 64 keys through shared memory that holds a tile as wide."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ...nvidia.pipelines import stacked, tile_box
from ..columns import columns_of
from ..layouts import element_type


@gluon.jit
def store_keys(ctx, rows, sums, widths: gl.constexpr, smem, part: gl.constexpr):
    """Start writing sums, parts of the columns of 64 keys, to keys `part` and on of the CTA's; TMA clips keys and
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
    """Start writing dV and dK of the warpgroup's 64 keys, in parts of 64 columns, through the halves of its buffer of
    dQ; the next write to it waits for them."""
    halves = half_tiles(ctx, wg)
    wait_copies()  # of dQ
    for i in gl.static_range(len(dv)):
        store_box(ctx, ctx.tensors.dv, dv[i], halves.index(i % 2), i, wg)
    for i in gl.static_range(len(dk)):
        store_box(ctx, ctx.tensors.dk, dk[i], halves.index((len(dv) + i) % 2), i, wg)


@gluon.jit
def store_box(ctx, rows, sums, smem, number: gl.constexpr, wg: gl.constexpr):
    """Start writing one part, once TMA has read the one before the last."""
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
    """A warpgroup's buffer of dQ as two tiles of dV or dK, each of 64 columns."""
    config: gl.constexpr = ctx.config
    dtype: gl.constexpr = element_type(config.element)
    box: gl.constexpr = tile_box(config.rows, config.dq_cols, config.ragged)
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(box, dtype)
    return ctx.rings.dq.index(wg).reinterpret(dtype, stacked(2, box), layout)


@gluon.jit
def wait_copies():
    """TMA has read what is on its way: the warpgroup may write to that shared memory again."""
    tma.store_wait(0)
    gl.barrier()
