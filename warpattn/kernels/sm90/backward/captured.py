"""Hopper's products for the gradients of tensors that a score captures; called by `nvidia/backward/captured.py`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ...nvidia.backward.arguments import CAPTURED_ROWS, PairProducts
from ..layouts import accumulator_layout


@gluon.jit
def no_memory():
    """Allocates nothing: results are in registers."""
    return gl.to_tensor(0)


@gluon.jit
def multiply(ctx, number):
    """Returns (Q · Kᵀ, dO · Vᵀ) of the tiles in shared memory."""
    layout: gl.constexpr = ctx.products.layout
    zero = gl.zeros([ctx.q_smem.shape[0], ctx.k_smem.shape[0]], gl.float32, layout)
    s = warpgroup_mma(ctx.q_smem, ctx.k_smem.permute((1, 0)), zero, use_acc=False, is_async=True)
    dp = warpgroup_mma(ctx.do_smem, ctx.v_smem.permute((1, 0)), zero, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=(s, dp))


PRODUCTS = PairProducts(accumulator_layout(CAPTURED_ROWS), no_memory, multiply)
