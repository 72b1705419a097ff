"""dV and dK of a warpgroup's keys, through the memory of its own part of V, which nobody else reads."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ...nvidia.pipelines import consumer_state
from ..layouts import element_type


@gluon.jit
def store_key_gradients(ctx, sums, wg: gl.constexpr):
    """Write dV and dK [64, D]; TMA clips keys and columns past the end."""
    config: gl.constexpr = ctx.config
    dtype: gl.constexpr = element_type(config.element)
    keys = ctx.keys
    smem = ctx.rings.v.tile(consumer_state(1), wg)
    staging = smem.reshape([config.rows, config.padded])
    row = keys.first + wg * config.rows
    staging.store(sums.dv.to(dtype))
    fence_async_shared()
    gl.barrier()
    ctx.tensors.dv.store(keys.k_start, keys.seq_k, row, keys.h, 0, smem)
    dk = (sums.dk * ctx.scale).to(dtype)
    tma.store_wait(0)
    staging.store(dk)
    fence_async_shared()
    gl.barrier()
    ctx.tensors.dk.store(keys.k_start, keys.seq_k, row, keys.h, 0, smem)
    tma.store_wait(0)
