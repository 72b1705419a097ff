"""Stores dV or dK of a CTA's keys from tensor memory, through the shared memory of V or K."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import fence_async_shared, tma

from ..layouts import STORE_COLUMNS, element_type


@gluon.jit
def store_sums(ctx, rows, sums, scale, ring):
    """Stores sums [N, D], times `scale` if it is a number, to the CTA's keys, through the memory of `ring`, which no
    product reads any more; TMA clips keys and columns past the end."""
    config: gl.constexpr = ctx.config
    keys = ctx.keys
    smem = ring.smem.index(0)
    columns: gl.constexpr = smem.shape[-1]
    tile = smem.reshape([config.rows, columns])
    for column in gl.static_range(0, columns, STORE_COLUMNS):
        x = sums.slice(column, STORE_COLUMNS).load()
        if scale is not None:
            x = x * scale
        tile.slice(column, STORE_COLUMNS, dim=1).store(x.to(element_type(config.element)))
    fence_async_shared()
    gl.barrier()
    rows.store(keys.k_start, keys.seq_k, keys.first, keys.h, 0, smem)
    tma.store_wait(0)  # shared memory must outlive the copy's reads
