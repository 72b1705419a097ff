"""Attention for gfx942 and gfx950, as small as can be: the next K and V are on their way to LDS during a tile."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna3
from triton.experimental.gluon.language.amd.cdna4 import async_copy

from tests.sim.amd.kernels import FLAT, grid2d, lds_layout

D: gl.constexpr = gl.constexpr(64)
BM: gl.constexpr = gl.constexpr(64)
BN: gl.constexpr = gl.constexpr(32)


@gluon.jit
def fetch(k, v, k_tiles, v_tiles, i, n, BYTES: gl.constexpr):
    """Start the copies of key tile i; beyond the last key they write zeros."""
    rows, cols = grid2d(BN, D, lds_layout(BYTES, k.dtype.element_ty, D))
    offsets = (i * BN + rows) * D + cols
    inside = (i * BN + rows) < n
    async_copy.buffer_load_to_shared(k_tiles.index(i % 2), k, offsets, mask=inside)
    async_copy.buffer_load_to_shared(v_tiles.index(i % 2), v, offsets, mask=inside)
    async_copy.commit_group()


@gluon.jit
def attention_kernel(q, k, v, out, n, scale, VERSION: gl.constexpr, FAULT: gl.constexpr):
    """One block of rows of one head; VERSION 3 is gfx942, 4 is gfx950."""
    bytes: gl.constexpr = 4 if VERSION == 3 else 16
    width: gl.constexpr = 4 if VERSION == 3 else 8
    mma: gl.constexpr = gl.amd.AMDMFMALayout(VERSION, [16, 16, 4 * width], True, [4, 1])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, width)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, width)
    dtype: gl.constexpr = k.dtype.element_ty
    k_tiles = gl.allocate_shared_memory(dtype, [2, BN, D], FLAT)
    v_tiles = gl.allocate_shared_memory(dtype, [2, BN, D], FLAT)
    rows, cols = grid2d(BM, D, left)
    first = gl.program_id(0) * BM
    queries = cdna3.buffer_load(q, (first + rows) * D + cols)
    fetch(k, v, k_tiles, v_tiles, 0, n, bytes)
    top = gl.full([BM], -float("inf"), gl.float32, gl.SliceLayout(1, mma))
    weight = gl.zeros([BM], gl.float32, gl.SliceLayout(1, mma))
    total = gl.zeros([BM, D], gl.float32, mma)
    for i in range(gl.cdiv(n, BN)):
        if FAULT != "late_fetch":
            fetch(k, v, k_tiles, v_tiles, i + 1, n, bytes)
        async_copy.wait_group(2 if FAULT == "loose_wait" else 1)
        keys = k_tiles.index(i % 2).permute((1, 0)).load(right)
        scores = cdna3.mfma(queries, keys, gl.zeros([BM, BN], gl.float32, mma)) * scale
        if FAULT == "late_fetch":
            fetch(k, v, k_tiles, v_tiles, i + 1, n, bytes)
        higher = gl.maximum(top, gl.max(scores, 1))
        shrink = gl.exp2(top - higher)
        p = gl.exp2(scores - higher[:, None])
        weight = weight * shrink + gl.sum(p, 1)
        total = total * shrink[:, None]
        values = v_tiles.index((i + 1) % 2 if FAULT == "wrong_slot" else i % 2).load(right)
        total = cdna3.mfma(gl.convert_layout(p.to(dtype), left), values, total)
        top = higher
    async_copy.wait_group(0)
    rows, cols = grid2d(BM, D, mma)
    cdna3.buffer_store(total / weight[:, None], out, (first + rows) * D + cols)
