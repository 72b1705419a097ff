"""Shared and tensor memory of the Blackwell kernel for wide heads. Its roles get a `LatentContext`, in which `keys` is
the ring that tiles of keys and of values take in turn, and `token_scales` an `OfTokens`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    mbarrier,
    tensor_memory_descriptor,
)

from ...nvidia.clipped_rows import stacked
from ...nvidia.kv_ring import KVPipeline
from ..layouts import box_layout, element_type
from ..mla.context import copy_columns, key_blocks
from ..recompute import KeyColumns, addressed, power_above, runs_of

ROWS_AT_ONCE = gl.constexpr(64)  # rows of a copy of queries


@gluon.aggregate
class WideMemory:
    q: gl.shared_memory_descriptor  # [blocks, BM, 256]
    p: gl.shared_memory_descriptor  # [BM, BN]
    s: tensor_memory_descriptor  # [BM, BN] fp32
    o: tensor_memory_descriptor  # [BM, blocks · 256] fp32

    @gluon.jit
    def copy_queries(self, ctx):
        """Starts copies of the rows' queries to shared memory."""
        config: gl.constexpr = ctx.config
        blocks: gl.constexpr = config.k_blocks
        count: gl.constexpr = config.BM
        for block in gl.static_range(blocks):
            for first in gl.static_range(0, count, ROWS_AT_ONCE):
                tile = self.q.index(block).slice(first, ROWS_AT_ONCE)
                copy_columns(ctx, ctx.q, tile, first, block * config.half, config.half)

    @gluon.jit
    def key_columns(self, ctx, x):
        """All columns, as one product with keys by their addresses; `x`: `KeyAddresses`."""
        dim: gl.constexpr = ctx.config.dim_qk
        return (KeyColumns(ctx.q, addressed(x.k), 0, 0, gl.to_tensor(runs_of(dim)), power_above(dim), "k"),)


@gluon.jit
def make_ring(config: gl.constexpr):
    """Slots of a tile of keys or of values, in blocks of 256 columns, with their barriers."""
    smem = key_blocks(config.blocks * config.stages, config.element, config)
    ring = KVPipeline(smem, mbarrier.allocate_mbarrier(batch=2 * config.stages), config.stages, config.blocks, 1)
    ring.init()
    return ring


@gluon.jit
def make_memory(config: gl.constexpr):
    """Shared memory beside the ring, and tensor memory."""
    dtype: gl.constexpr = element_type(config.element)
    block: gl.constexpr = [config.BM, config.half]
    p_shape: gl.constexpr = [config.BM, config.BN]
    o_shape: gl.constexpr = [config.BM, config.padded_ov_depth]
    return WideMemory(
        gl.allocate_shared_memory(dtype, stacked(config.k_blocks, block), box_layout(block, dtype)),
        gl.allocate_shared_memory(dtype, p_shape, box_layout(p_shape, dtype)),
        allocate_tensor_memory(gl.float32, p_shape, TensorMemoryLayout(p_shape, 1)),
        allocate_tensor_memory(gl.float32, o_shape, TensorMemoryLayout(block, 1)),
    )
