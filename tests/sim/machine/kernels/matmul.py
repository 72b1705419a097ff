"""A matmul as it is usually written in Triton: what a launch compiles has copies ahead of the products."""

import triton
import triton.language as tl


@triton.jit
def matmul_kernel(a, b, c, n, stride_a, stride_b, inner, B: tl.constexpr):
    """c = a·b, [n, n] each; `inner`: the stride of columns."""
    rows, cols, depth = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1) * B + tl.arange(0, B), tl.arange(0, B)
    a_at = a + (rows % n)[:, None] * stride_a + depth[None, :] * inner
    b_at = b + depth[:, None] * stride_b + (cols % n)[None, :] * inner
    total = tl.zeros([B, B], tl.float32)
    for k in range(0, n, B):
        x = tl.load(a_at, mask=depth[None, :] < n - k, other=0.0)
        total += tl.dot(x, tl.load(b_at, mask=depth[:, None] < n - k, other=0.0))
        a_at += B * inner
        b_at += B * stride_b
    inside = (rows[:, None] < n) & (cols[None, :] < n)
    tl.store(c + rows[:, None] * n + cols[None, :], total, mask=inside)
