"""dV or dK of 64 keys through shared memory that holds a tile as wide, once nobody reads it any more."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ..layouts import element_type


@gluon.jit
def store_keys(ctx, rows, sums, smem, part: gl.constexpr):
    """Write sums, one or two parts of the columns of 64 keys, to keys `part` and on of the CTA's, and wait until TMA
    has read them; it clips keys and columns past the end."""
    keys = ctx.keys
    dtype: gl.constexpr = element_type(ctx.config.element)
    cols: gl.constexpr = sums[0].shape[1]
    if len(sums) == 1:
        smem.reshape([ctx.config.rows, cols]).store(sums[0].to(dtype))
    else:
        tile = smem.reshape([ctx.config.rows, 2 * cols])
        tile.slice(0, cols, dim=1).store(sums[0].to(dtype))
        tile.slice(cols, cols, dim=1).store(sums[1].to(dtype))
    fence_async_shared()
    gl.barrier()
    rows.store(keys.k_start, keys.seq_k, keys.first + part, keys.h, 0, smem)
    tma.store_wait(0)
    gl.barrier()
