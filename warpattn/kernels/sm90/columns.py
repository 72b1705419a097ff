"""Tiles of head dims that are not a power of two, kept as a tuple of parts that are: 192 columns are 128 and 64.

TMA boxes, shared-memory tiles and register tensors need a power of two of columns. So a tile of Q, K, V or O is a tuple
with one entry per part; it has a single entry where the head dim is a power of two itself.

      S = Q₀·K₀ᵀ + Q₁·K₁ᵀ      one accumulator, one wgmma after the other adds to it
      O₀ = P·V₀   O₁ = P·V₁    one accumulator per part
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from ..nvidia.pipelines import make_tiles
from ..pieces.softmax import rescale
from .layouts import accumulator_layout


@gluon.aggregate
class Columns:
    """Tiles in parts, indexed as one descriptor."""

    parts: gl.tuple  # each [tiles, ..., columns of the part]

    @gluon.jit
    def index(self, number):
        """The parts of one tile."""
        tile = ()
        for part in gl.static_range(len(self.parts)):
            tile += (self.parts[part].index(number),)
        return tile


@gluon.jit
def make_columns(
    count: gl.constexpr, rows: gl.constexpr, widths: gl.constexpr, dtype: gl.constexpr, clipped: gl.constexpr,
    packed: gl.constexpr = 1,
):  # fmt: skip
    """Shared memory for `count` tiles in parts of `widths` columns."""
    parts = ()
    for part in gl.static_range(len(widths)):
        parts += (make_tiles(count, rows, widths[part], dtype, clipped, packed),)
    return Columns(parts)


@gluon.jit
def as_matrices(tile, rows: gl.constexpr, widths: gl.constexpr):
    """The parts of a tile as [rows, columns], without the box's dimensions of size 1."""
    parts = ()
    for part in gl.static_range(len(widths)):
        parts += (tile[part].reshape([rows, widths[part]]),)
    return parts


@gluon.jit
def zero_columns(rows: gl.constexpr, widths: gl.constexpr, depth: gl.constexpr = 16):
    """Zero accumulators, one for each part."""
    parts = ()
    for part in gl.static_range(len(widths)):
        parts += (gl.zeros([rows, widths[part]], gl.float32, accumulator_layout(widths[part], depth)),)
    return parts


@gluon.jit
def wait_columns(outstanding: gl.constexpr, pending, pairs):
    """Waits for all but `outstanding` wgmmas; returns the accumulators of P·V. `pairs`: P, kept in registers so far."""
    operands = (pairs,)
    done = warpgroup_mma_wait(outstanding, deps=pending + operands)
    parts = ()
    for part in gl.static_range(len(pending)):
        parts += (done[part],)
    return parts


@gluon.jit
def rescale_columns(o, alpha):
    """Multiplies every part of O [M, columns] by alpha [M, 4]."""
    parts = ()
    for part in gl.static_range(len(o)):
        parts += (rescale(o[part], alpha),)
    return parts
