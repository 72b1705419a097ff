"""Blackwell's products for the gradients of tensors that a score captures; see `nvidia/backward/captured.py`.

Both have 64 rows, which take 16 of every 32 lanes of tensor memory. All four warps wait for them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
    tensor_memory_descriptor,
    tensor_memory_descriptor_type,
)

from ...nvidia.backward import arguments as sizes
from ...nvidia.backward.arguments import PairProducts
from ..sync import await_signal

TILE = gl.constexpr(sizes.CAPTURED_ROWS)


@gluon.aggregate
class PairMemory:
    """Tensor memory of the products of a tile, and the barrier that completes when both are there."""

    s: tensor_memory_descriptor  # [TILE, TILE] fp32
    dp: tensor_memory_descriptor
    done: gl.shared_memory_descriptor


@gluon.jit
def make_memory():
    """Allocates a `PairMemory`."""
    layout: gl.constexpr = TensorMemoryLayout([TILE, TILE], 1)
    done = mbarrier.allocate_mbarrier()
    mbarrier.init(done, count=1)
    s = allocate_tensor_memory(gl.float32, [TILE, TILE], layout)
    return PairMemory(s, allocate_tensor_memory(gl.float32, [TILE, TILE], layout), done)


@gluon.jit
def multiply(ctx, number):
    """(Q · Kᵀ, dO · Vᵀ) of the tiles in shared memory; `number`: products before."""
    memory = ctx.memory
    gl.inline_asm("tcgen05.fence::after_thread_sync;")  # after a barrier: all have read the last products
    tcgen05_mma(ctx.q_smem, ctx.k_smem.permute((1, 0)), memory.s, use_acc=False)
    tcgen05_mma(ctx.do_smem, ctx.v_smem.permute((1, 0)), memory.dp, use_acc=False)
    tcgen05_commit(memory.done)
    await_signal(memory.done, number & 1)
    s, dp = memory.s.load(), memory.dp.load()
    gl.inline_asm("tcgen05.fence::before_thread_sync;")
    return s, dp


def pair_layout() -> object:
    """Registers of a tile as loaded from tensor memory; converted to runs of a row they would spill."""
    shape = [sizes.CAPTURED_ROWS] * 2
    tile = tensor_memory_descriptor_type(gl.float32, shape, TensorMemoryLayout(shape, 1), shape)
    return tile.get_reg_layout(num_warps=4)


PRODUCTS = PairProducts(pair_layout(), make_memory, multiply)
