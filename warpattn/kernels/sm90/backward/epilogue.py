"""dV or dK of 64 keys through shared memory that holds a tile as wide."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

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
def wait_copies():
    """TMA has read what is on its way: the warpgroup may write to that shared memory again."""
    tma.store_wait(0)
    gl.barrier()
