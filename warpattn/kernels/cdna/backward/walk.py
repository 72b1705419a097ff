"""Which query tiles meet the keys of a workgroup.

The mask bounds the keys of a tile of rows; here the keys are given and the rows are wanted. So a wave evaluates the
bounds of 64 query tiles at once, one a lane, and visits those that meet the keys: exact for every mask, no inverse. All
four waves do the same.

      key tile n           rows 0..31   rows 32..63   ...     lanes of one test
      bounds of the rows   [a, b)       [c, d)                meets: first < n end and n begin < last
                                                              masked: not inside of [full_lo, full_hi)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...pieces.scheduler import Tile
from . import config as sizes

SEARCH = gl.constexpr(sizes.SEARCH)


@gluon.aggregate
class Search:
    """Where the search for query tiles has arrived: lanes of a block of tiles of a head, and the last one taken."""

    h: gl.tensor  # query head
    block: gl.tensor  # first tile of the block
    lanes: gl.tensor  # [SEARCH] int32: 2 · lane + whether the tile is masked; NONE where a tile does not meet the keys
    taken: gl.tensor  # the last one of `lanes`; -1: none yet


@gluon.aggregate
class Visit:
    """A query tile that meets the keys."""

    h: gl.tensor  # query head
    row: gl.tensor  # first row; that behind the last one where no tile is left
    masked: gl.tensor  # whether a pair of the tile may be hidden


NONE = gl.constexpr(2 * sizes.SEARCH)


@gluon.jit
def first_visit(ctx, work, key):
    """(search, visit): the first tile of the first query head that meets the keys."""
    return next_visit(ctx, work, key, search_block(ctx, work, key, work.kv_head * ctx.shape.group, gl.to_tensor(0)))


@gluon.jit
def next_visit(ctx, work, key, search):
    """(search, visit): the next tile that meets the keys."""
    tiles = query_tiles(ctx, work)
    end = (work.kv_head + 1) * ctx.shape.group
    found = next_lane(search)
    while (found == NONE) & (search.h < end):
        block = search.block + SEARCH
        done = block >= tiles
        h = search.h + gl.where(done, 1, 0)
        search = search_block(ctx, work, key, h, gl.where(done, 0, block))
        found = gl.where(h < end, next_lane(search), NONE)
    row = gl.where(found < NONE, (search.block + found // 2) * ctx.config.block_m, work.lengths.seq_q)
    h = gl.minimum(search.h, end - 1)
    return Search(search.h, search.block, search.lanes, found), Visit(h, row, found % 2 != 0)


@gluon.jit
def next_lane(search):
    """The first of the lanes after the last one taken; NONE if there is none."""
    return gl.min(gl.where(search.lanes > search.taken, search.lanes, NONE), 0)


@gluon.jit
def search_block(ctx, work, key, h, block):
    """Test the bounds of SEARCH query tiles of a head, from tile `block` on."""
    layout: gl.constexpr = lane_layout(ctx.config)
    lane = gl.arange(0, SEARCH, layout)
    row = (block + lane) * ctx.config.block_m
    first, full_lo, full_hi, last = ctx.mods.key_span(Tile(work.rows.b, h, row), work.lengths, ctx.config.block_m)
    end = key + ctx.config.block_n
    meets = (block + lane < query_tiles(ctx, work)) & (first < end) & (key < last)
    whole = (full_lo <= key) & (end <= full_hi) & (row + ctx.config.block_m <= work.lengths.seq_q)
    return Search(h, block, gl.where(meets, 2 * lane + gl.where(whole, 0, 1), NONE), gl.to_tensor(-1))


@gluon.jit
def query_tiles(ctx, work):
    """Query tiles of a head."""
    return (work.lengths.seq_q + ctx.config.block_m - 1) // ctx.config.block_m


@gluon.constexpr_function
def lane_layout(config):
    """One query tile a lane, the same ones in every wave."""
    return gl.BlockedLayout([1], [sizes.SEARCH], [config.waves], [0])
