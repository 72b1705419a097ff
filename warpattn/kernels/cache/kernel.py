"""Writes new keys and values into the pages of a cache, and rotates the keys if tables are given.

One program per new token and block of heads reads the token's position from the length of its sequence, finds the page,
and copies. Rotation reads each element's partner once more, from L1:

      half-split    x[c] · cos[c mod R/2]  -+  x[c ± R/2] · sin[c mod R/2]      first R columns, first half minus
      interleaved   x[c] · cos[c div 2]    -+  x[c xor 1] · sin[c div 2]        first R columns, even ones minus

A program writes nothing for positions below 0 or past the table, and for pages that are not in the cache.

Attention usually follows. On Hopper every program triggers the dependent launch when it begins (PDL): attention itself
waits for the keys and values of this launch, and all else was written before.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents

from .config import HEADS

_HEADS = gl.constexpr(HEADS)


@gluon.aggregate
class NewToken:
    """A new token, and its row in the cache."""

    b: gl.tensor  # sequence
    token: gl.tensor  # among the new ones
    page: gl.tensor
    row: gl.tensor  # of the page
    position: gl.tensor  # in the sequence
    inside: gl.tensor  # bool: whether the cache has that row


@gluon.jit
def append_kernel(
    k_pages, v_pages, k_new, v_new, table, lengths, cos, sin, shape,
    dims: gl.constexpr, rotation: gl.constexpr, lanes: gl.constexpr, trigger_dependents: gl.constexpr,
):  # fmt: skip
    """k_pages, v_pages, k_new, v_new: `Rows`. table, cos, sin: `Table`. shape: `AppendShape`. dims: head dims of K and
    V. lanes: of a warp. trigger_dependents: whether the next launch may start at once. Grid: (sequences * tokens,
    blocks of HEADS heads)."""
    if trigger_dependents:
        gdc_launch_dependents()
    tokens = shape.tokens
    b = gl.program_id(0) // tokens
    token = gl.program_id(0) - b * tokens
    position = gl.load(lengths + b) - tokens + token
    slot = position // shape.page_size
    inside = (position >= 0) & (slot < shape.table_pages)
    page = gl.load(table.pointer + b.to(gl.int64) * table.stride + slot, mask=inside, other=-1)
    inside = inside & (page >= 0) & (page < shape.pages)
    at = NewToken(b, token, page, position - slot * shape.page_size, position, inside)
    copy_rows(k_new, k_pages, at, shape.heads, (cos, sin), dims[0], rotation, lanes)
    copy_rows(v_new, v_pages, at, shape.heads, (cos, sin), dims[1], None, lanes)


@gluon.jit
def copy_rows(
    source, target, at, heads, angles, dim: gl.constexpr, rotation: gl.constexpr, lanes: gl.constexpr
):  # fmt: skip
    """The rows of a block of heads of a new token to its page."""
    width: gl.constexpr = 1 << (dim - 1).bit_length()
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [lanes // 32, 32], [4, 1], [1, 0])
    head = gl.program_id(1) * _HEADS + gl.arange(0, _HEADS, gl.SliceLayout(1, layout))
    col = gl.arange(0, width, gl.SliceLayout(0, layout))[None, :]
    there = (head < heads)[:, None] & (col < dim) & at.inside
    rows = source.pointer + at.b.to(gl.int64) * source.outer + at.token.to(gl.int64) * source.row + head * source.head
    rows = rows[:, None]
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
        turned = (col < rotation.dim) & at.inside
        other = gl.load(rows + partner, mask=there & turned, other=0.0).to(gl.float32)
        c = gl.load(cos.pointer + at.position.to(gl.int64) * cos.stride + angle, mask=turned, other=1.0).to(gl.float32)
        s = gl.load(sin.pointer + at.position.to(gl.int64) * sin.stride + angle, mask=turned, other=0.0).to(gl.float32)
        x = (x.to(gl.float32) * c + gl.where(first, -other, other) * s).to(x.dtype)
    pages = target.pointer + at.page.to(gl.int64) * target.outer + at.row.to(gl.int64) * target.row + head * target.head
    gl.store(pages[:, None] + col, x, mask=there)
