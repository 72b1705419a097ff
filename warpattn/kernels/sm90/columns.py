"""Tiles whose columns are the parts of a head dim, each as wide as a power of two: 192 columns are 128 and 64.

Boxes of TMA, tiles of shared memory and register tensors have a power of two of columns, and most head dims do not. So
a tile of Q, K, V or O is a tuple with an entry for each part, and one where the head dim itself is a power of two:

      S = Q₀·K₀ᵀ + Q₁·K₁ᵀ      products in a row, one accumulator
      O₀ = P·V₀   O₁ = P·V₁    an accumulator a part

All parts of a tile share the barriers of its slot.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from ..nvidia.pipelines import make_tiles
from ..pieces.softmax import rescale
from .layouts import accumulator_layout


@gluon.aggregate
class Columns:
    """Tiles in parts, indexed as if they were whole."""

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
    """Shared memory of `count` tiles whose parts are so wide."""
    parts = ()
    for part in gl.static_range(len(widths)):
        parts += (make_tiles(count, rows, widths[part], dtype, clipped, packed),)
    return Columns(parts)


@gluon.jit
def as_matrices(tile, rows: gl.constexpr, widths: gl.constexpr):
    """The parts of a tile [rows, columns], without the dimensions of one element."""
    parts = ()
    for part in gl.static_range(len(widths)):
        parts += (tile[part].reshape([rows, widths[part]]),)
    return parts


@gluon.constexpr_function
def columns_before(widths, part):
    """First column of a part; of the one behind the last, all columns."""
    return sum(widths[:part])


@gluon.jit
def columns_of(tile, widths: gl.constexpr, part: gl.constexpr):
    """The columns of one part of a tile."""
    if widths[part] == tile.shape[1]:
        return tile
    else:
        return tile.slice(columns_before(widths, part), widths[part], dim=1)


@gluon.jit
def zero_columns(rows: gl.constexpr, widths: gl.constexpr, depth: gl.constexpr = 16):
    """Accumulators of nothing."""
    parts = ()
    for part in gl.static_range(len(widths)):
        parts += (gl.zeros([rows, widths[part]], gl.float32, accumulator_layout(widths[part], depth)),)
    return parts


@gluon.jit
def wait_columns(outstanding: gl.constexpr, pending, pairs):
    """The accumulators of P·V, once all but `outstanding` products are done; `pairs`: P, whose registers they read."""
    operands = (pairs,)
    done = warpgroup_mma_wait(outstanding, deps=pending + operands)
    parts = ()
    for part in gl.static_range(len(pending)):
        parts += (done[part],)
    return parts


@gluon.jit
def rescale_columns(o, alpha):
    """Every part of O [M, columns] times alpha [M, 4]."""
    parts = ()
    for part in gl.static_range(len(o)):
        parts += (rescale(o[part], alpha),)
    return parts
