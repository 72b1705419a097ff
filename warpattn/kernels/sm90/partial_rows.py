"""Query tiles whose heads do not fill their rows: 7 heads of 9 tokens use 63 of a warpgroup's 64.

Shared memory and registers have all rows. TMA copies a box of 9 x 7 rows, which follow each other in shared memory,
into the first rows of the tile, and stores these alone (prefill/query_maps.py). The others hold queries of zeros from
the start; nothing reads what they give.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .layouts import accumulator_layout


@gluon.constexpr_function
def used_rows(config):
    """Rows of a warpgroup that hold queries: all, or the most that so many heads fill."""
    return config.wg_tokens * config.packed


@gluon.constexpr_function
def fills_rows(config):
    """Whether they are all rows."""
    return used_rows(config) == config.rows


@gluon.constexpr_function
def box_heads(config):
    """Heads of a row of a query tile's box as Triton knows it, whose dimensions are powers of two."""
    return config.packed if fills_rows(config) else 1


@gluon.constexpr_function
def log2(power):
    """The logarithm of a power of two."""
    return power.bit_length() - 1


@gluon.jit
def token_of(row, config: gl.constexpr):
    """The token of a warpgroup's rows, from its first one on."""
    if fills_rows(config):
        return row >> log2(config.packed)
    else:
        return row // config.packed


@gluon.jit
def head_of(row, config: gl.constexpr):
    """The query head of a warpgroup's rows, from its tile's first one on."""
    if fills_rows(config):
        return row & (config.packed - 1)
    else:
        return row % config.packed


@gluon.jit
def in_use(inside, config: gl.constexpr):
    """The rows [64] of `inside` that hold queries."""
    if fills_rows(config):
        return inside
    else:
        return inside & (gl.arange(0, config.rows, inside.type.layout) < used_rows(config))


@gluon.jit
def clear_queries(queries, config: gl.constexpr):
    """Writes zeros to the tiles of the Q ring, of which no copy writes the rows that hold no queries."""
    if not fills_rows(config):
        for part in gl.static_range(len(queries.parts)):
            clear_tiles(queries.parts[part], config.rows, config.qk_parts[part])


@gluon.jit
def clear_tiles(ring, rows: gl.constexpr, columns: gl.constexpr):
    """Writes zeros to all tiles of one part of the columns."""
    zeros = gl.zeros([rows, columns], ring.dtype, accumulator_layout(columns))
    for tile in range(ring.shape[0]):
        ring.index(tile).reshape([rows, columns]).store(zeros)
