"""Kernels around descriptors that differ from the plain ones: in im2col mode, padded with NaN, rounding to tf32."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit
def pixels_kernel(x, out, n, h, w, down, right):
    """Pixels of a box of `x` [N, H, W, C], from (n, h, w) on, moved down and right."""
    smem = gl.allocate_shared_memory(x.dtype, x.block_type.shape, x.layout)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, x.block_type.nbytes)
    offsets = [gl.to_tensor(down).to(gl.int16), gl.to_tensor(right).to(gl.int16)]
    tma.async_load_im2col(x, [n, h, w, 0], offsets, bar, smem)
    mbarrier.wait(bar, 0)
    tma.async_store(out, [0, 0], smem)
    tma.store_wait(0)
    mbarrier.invalidate(bar)


@triton.jit
def corner_kernel(x, out, B: tl.constexpr):
    """The box that ends beyond a tensor of the host's descriptor."""
    at = tl.arange(0, B)
    tl.store(out + at[:, None] * B + at[None, :], x.load([16, 16]))


@triton.jit
def own_corner_kernel(x, out, rows, cols, stride, B: tl.constexpr):
    """The same with a descriptor of the kernel, padded with NaN."""
    made = tl.make_tensor_descriptor(x, [rows, cols], [stride, 1], [B, B], padding_option="nan")
    at = tl.arange(0, B)
    tl.store(out + at[:, None] * B + at[None, :], made.load([16, 16]))
