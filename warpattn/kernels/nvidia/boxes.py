"""Tiles of rows in shared memory, as boxes that TMA copies."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def tile_box(rows, cols, clipped, packed=1):
    """Shape of a tile of rows of `packed` heads in its descriptor: 4-D, or 5-D for a `ClippedRows`."""
    return (1,) * (1 + clipped) + (rows // packed, packed, cols)


@gluon.constexpr_function
def stacked(count, box):
    """Shape of `count` tiles."""
    return (count, *box)


@gluon.jit
def make_tiles(
    count: gl.constexpr, rows: gl.constexpr, cols: gl.constexpr, dtype: gl.constexpr, clipped: gl.constexpr,
    packed: gl.constexpr = 1,
):  # fmt: skip
    """Shared memory of `count` tiles."""
    box: gl.constexpr = tile_box(rows, cols, clipped, packed)
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(box, dtype)
    return gl.allocate_shared_memory(dtype, stacked(count, box), layout)
