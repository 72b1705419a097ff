"""Writes new keys and values into the pages of a cache, keys rotated on the way if tables are given.

One program per new token and block of heads: it reads the token's position from the length of its sequence, finds the
page, and copies. Rotation needs each element's partner, which is read once more (it is in L1):

      half-split    x[c] · cos[c mod R/2]  -+  x[c ± R/2] · sin[c mod R/2]      first R columns, first half minus
      interleaved   x[c] · cos[c div 2]    -+  x[c xor 1] · sin[c div 2]        first R columns, even ones minus

What has no place is not written: positions below 0 or past the table, pages that are not in the cache.

Attention usually follows at once. On Hopper it may come as soon as every program here has begun (programmatic dependent
launch): it waits by itself for what is written here, and all else was written before.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents

from .config import HEADS

_HEADS = gl.constexpr(HEADS)


@gluon.jit
def append_kernel(
    k_pages,
    v_pages,
    k_new,
    v_new,
    table,
    lengths,
    cos,
    sin,
    shape,
    dims: gl.constexpr,
    rotation: gl.constexpr,
    lanes: gl.constexpr,
    hands_over: gl.constexpr,
):
    """k_pages, v_pages, k_new, v_new: (pointer, strides of page or sequence, row or token, head). table, cos, sin:
    (pointer, row stride). shape: (tokens, heads, pages, page_size, pages of a table row). dims: head dims of K and V.
    lanes: of a warp. hands_over: whether the next launch may come early. Grid: (sequences * tokens, blocks of HEADS
    heads)."""
    if hands_over:
        gdc_launch_dependents()
    tokens = shape[0]
    b = gl.program_id(0) // tokens
    token = gl.program_id(0) - b * tokens
    position = gl.load(lengths + b) - tokens + token
    slot = position // shape[3]
    inside = (position >= 0) & (slot < shape[4])
    page = gl.load(table[0] + b.to(gl.int64) * table[1] + slot, mask=inside, other=-1)
    inside = inside & (page >= 0) & (page < shape[2])
    place = (b, token, page, position - slot * shape[3], position, inside)
    copy_rows(k_new, k_pages, place, shape[1], (cos, sin), dims[0], rotation, lanes)
    copy_rows(v_new, v_pages, place, shape[1], (cos, sin), dims[1], None, lanes)


@gluon.jit
def copy_rows(
    source, target, place, heads, angles, dim: gl.constexpr, rotation: gl.constexpr, lanes: gl.constexpr
):  # fmt: skip
    """The rows of a block of heads from (sequence, token) to (page, row), the first four of `place`."""
    b, token, page, row, position, inside = place
    width: gl.constexpr = 1 << (dim - 1).bit_length()
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [lanes // 32, 32], [4, 1], [1, 0])
    head = gl.program_id(1) * _HEADS + gl.arange(0, _HEADS, gl.SliceLayout(1, layout))
    col = gl.arange(0, width, gl.SliceLayout(0, layout))[None, :]
    there = (head < heads)[:, None] & (col < dim) & inside
    rows = (source[0] + b.to(gl.int64) * source[1] + token.to(gl.int64) * source[2] + head * source[3])[:, None]
    x = gl.load(rows + col, mask=there, other=0.0)
    if rotation is not None:
        half: gl.constexpr = rotation.dim // 2
        if rotation.interleaved:
            partner = col ^ 1
            angle = col // 2
            first = (col & 1) == 0
        else:
            partner = gl.where(col < half, col + half, col - half)
            angle = gl.where(col < half, col, col - half)
            first = col < half
        cos, sin = angles
        turned = (col < rotation.dim) & inside
        other = gl.load(rows + partner, mask=there & turned, other=0.0).to(gl.float32)
        c = gl.load(cos[0] + position.to(gl.int64) * cos[1] + angle, mask=turned, other=1.0).to(gl.float32)
        s = gl.load(sin[0] + position.to(gl.int64) * sin[1] + angle, mask=turned, other=0.0).to(gl.float32)
        x = (x.to(gl.float32) * c + gl.where(first, -other, other) * s).to(x.dtype)
    pages = target[0] + page.to(gl.int64) * target[1] + row.to(gl.int64) * target[2] + head * target[3]
    gl.store(pages[:, None] + col, x, mask=there)
