"""Producer warp of a backward: takes key tiles, finds query tiles that meet them, and feeds K, V, Q and dO.
Of the next keys Q and dO are loaded, and K and V after their last readers, while gradients of the last ones leave.

The mask bounds the keys of a tile of rows; here the keys are given and the rows are wanted. So the warp evaluates the
bounds of 32 query tiles at once, one a lane, and visits those that meet the keys: exact for every mask, no inverse. The
attending warps get each tile's first row with its slot, whether it needs the mask, and whether another one follows.
Tiles come head after head, or the heads of a group side by side (`tile_at`).

      key tile n           rows 0..63   rows 64..127  ...     lanes of one test
      bounds of the rows   [a, b)       [c, d)                meets: first < n end and n begin < last
                                                              masked: not inside of [full_lo, full_hi)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ...pieces.scheduler import fetch_next, resolve_next
from ..pipelines import producer_state
from . import arguments as sizes
from .turns import key_tile, sharing
from .visits import FIRST, MASKED, MORE, STAGES, Visit, at_keys, no_visit, publish_visit

SEARCH = gl.constexpr(sizes.SEARCH)
BEHIND = gl.constexpr(sizes.BEHIND)


@gluon.aggregate
class Search:
    """Where the search for query tiles has arrived: lanes of a block of tiles, and the last lane taken."""

    origin: gl.tensor  # the query tile that a walk of heads side by side begins with
    h: gl.tensor  # query head, or the first of those side by side
    block: gl.tensor  # number of the block's first tile, as `tile_at` counts
    meets: gl.tensor  # [SEARCH] bool
    masked: gl.tensor  # [SEARCH] int32, the flag
    turn: gl.tensor  # [SEARCH]
    lane: gl.tensor


@gluon.jit
def load_role(ctx):
    """Load key tiles until none is left, and publish that."""
    state = producer_state(STAGES)  # of the rings of Q and dO
    key_state = producer_state(1)
    number = gl.program_id(0)
    total = ctx.work.total()
    while number < total:
        state = load_tiles(at_keys(ctx, number), state, key_state, number)
        key_state = key_state.step()
        if ctx.config.persistent:
            taken = fetch_next(ctx.tensors.counter, ctx.work, number)
            number = resolve_next(ctx.tensors.counter, ctx.work, number, taken)
        else:
            number = total
    if ctx.config.persistent:
        announce_end(ctx, state)


@gluon.jit
def load_tiles(ctx, state, key_state, number):
    """Load the keys and values, and every query tile that meets the keys; the state of the slot behind."""
    search, visit = next_visit(ctx, first_search(ctx, number), number)
    visit = at_least_one(visit)
    pending = gl.to_tensor(True)
    while visit.row >= 0:
        load_rows(ctx, (ctx.tensors.q, ctx.tensors.shift), ctx.rings.q, ctx.rings.shift, state, visit)
        if pending:
            ctx.rings.k.producer_acquire(key_state)  # V, too, was read before the last dS, and K of it is released last
            load_keys(ctx, ctx.tensors.k, ctx.rings.k, visit, ctx.config.padded_qk)
        search, following = next_visit(ctx, search, number)  # while Q is on its way
        announce(ctx, state, visit, following)
        load_rows(ctx, (ctx.tensors.do, ctx.tensors.delta), ctx.rings.do, ctx.rings.delta, state, visit)
        if pending:  # behind dO, which is needed no later
            load_keys(ctx, ctx.tensors.v, ctx.rings.v, visit, ctx.config.padded_v)
            pending = gl.to_tensor(False)
        state = state.step()
        visit = following
    return state


@gluon.jit
def at_least_one(visit):
    """The first visit of a key tile. Where no query tile meets the keys it is of rows and keys behind the last ones:
    zeros, all hidden, whose gradients are zeros, and what they add to dQ is past its end."""
    none = visit.row < 0
    row, flags = gl.where(none, BEHIND, visit.row), gl.where(none, MASKED, visit.flags)
    return Visit(visit.b, visit.h, row, flags, visit.turn, visit.number)


@gluon.jit
def first_key(ctx, visit):
    """The first key of a visit."""
    return ctx.keys.first + (visit.row & BEHIND)


@gluon.jit
def announce_end(ctx, state):
    """Publish that no keys are left: a slot without a tile."""
    full = ctx.rings.q.producer_acquire(state)
    publish_visit(ctx.rings.visits, state.index + STAGES * (state.phase ^ 1), no_visit(ctx))
    mbarrier.arrive(full, count=2)
    if ctx.config.reduces:
        full = ctx.rings.ds.producer_acquire(state)  # for `reduce`, which no dS reaches
        mbarrier.arrive(full, count=4 * ctx.config.key_parts)


@gluon.jit
def load_keys(ctx, source, ring, visit, cols: gl.constexpr):
    """Keys or values of the CTA, `cols` columns, in parts."""
    keys = ctx.keys
    full = ring.full(0)
    mbarrier.expect(full, ctx.config.key_bytes(cols))
    parts: gl.constexpr = ctx.config.key_parts
    boxes: gl.constexpr = ring.parts // parts
    for part in gl.static_range(parts):
        row = first_key(ctx, visit) + part * ctx.config.rows
        for box in gl.static_range(boxes):
            smem = ring.smem.index(part * boxes + box)
            source.load(keys.k_start, keys.seq_k, row, keys.h, full, smem, box * smem.shape[-1])


@gluon.jit
def load_rows(ctx, sources, ring, numbers, state, visit):
    """Rows of Q or dO with their numbers into the next slot."""
    keys = ctx.keys
    full = ring.producer_acquire(state)
    cols: gl.constexpr = ring.smem.shape[-1]
    boxes: gl.constexpr = ring.parts
    mbarrier.expect(full, ctx.config.row_bytes(boxes * cols))
    for box in gl.static_range(boxes):
        sources[0].load(keys.q_start, keys.seq_q, visit.row, visit.h, full, ring.tile(state, box), box * cols)
    tma.async_load(sources[1], [keys.head + visit.h, keys.row + visit.row], full, numbers.index(state.index))


@gluon.jit
def announce(ctx, state, visit, following):
    """Publish a visit, and whether another one follows; Q of its slot is full when it has arrived, too."""
    flags = visit.flags | gl.where(following.row >= 0, MORE, 0) | (first_key(ctx, visit) << FIRST)
    visit = Visit(visit.b, visit.h, visit.row, flags, visit.turn, visit.number)
    publish_visit(ctx.rings.visits, state.index + STAGES * (state.phase ^ 1), visit)
    mbarrier.arrive(ctx.rings.q.full(state.index), count=1)


@gluon.jit
def first_search(ctx, number):
    """The search before the first tile of the first query head."""
    h = ctx.keys.h * ctx.keys.group
    origin = gl.to_tensor(0)
    if ctx.config.side_by_side:
        origin = query_tiles(ctx) - 1
        origin = gl.where(ctx.work.downward(number, ctx.config), origin, 0)
    return search_block(ctx, origin, h, gl.to_tensor(0), number)


@gluon.jit
def next_visit(ctx, search, number):
    """(search, visit): the next tile that meets the keys; its row is -1 if there is none."""
    keys = ctx.keys
    together = heads_together(ctx)
    tiles = query_tiles(ctx) * together
    end = (keys.h + 1) * keys.group
    found = next_lane(search)
    while (found == SEARCH) & (search.h < end):
        block = search.block + SEARCH
        done = block >= tiles
        h = search.h + gl.where(done, together, 0)
        search = search_block(ctx, search.origin, h, gl.where(done, 0, block), number)
        found = gl.where(search.h < end, next_lane(search), SEARCH)
    lane = gl.arange(0, SEARCH, lane_layout())
    flags = gl.sum(gl.where(lane == found, search.masked, 0), 0)
    h, row = tile_at(ctx, search.origin, search.h, search.block + found)
    row = gl.where(found < SEARCH, row, -1)
    turn = gl.sum(gl.where(lane == found, search.turn, 0), 0)
    visit = Visit(keys.b, h, row, flags, turn, number)
    return Search(search.origin, search.h, search.block, search.meets, search.masked, search.turn, found), visit


@gluon.jit
def next_lane(search):
    """The first lane after the last one taken whose tile meets the keys; SEARCH if there is none."""
    lane = gl.arange(0, SEARCH, lane_layout())
    return gl.min(gl.where(search.meets & (lane > search.lane), lane, SEARCH), 0)


@gluon.jit
def search_block(ctx, origin, h, block, number):
    """Test the bounds of SEARCH query tiles of a head or those side by side, from tile number `block` on."""
    keys = ctx.keys
    block_m: gl.constexpr = ctx.config.block_m
    tile = block + gl.arange(0, SEARCH, lane_layout())
    its_h, row = tile_at(ctx, origin, h, tile)
    offset = keys.seq_k - keys.seq_q
    q_lo = row + offset
    q_hi = gl.minimum(row + block_m, keys.seq_q) - 1 + offset
    mods = ctx.mods
    first, full_lo, full_hi, last = mods.span(keys.b, its_h, q_lo, q_hi, keys.seq_q, keys.seq_k, mods.mask_args)
    end = keys.first + ctx.config.block_n
    meets = (tile < query_tiles(ctx) * heads_together(ctx)) & (first < end) & (keys.first < last)
    clean = (full_lo <= keys.first) & (end <= full_hi) & (row >= 0)
    if ctx.mods.score is not None:
        clean = clean & (row + block_m <= keys.seq_q)
    turn = gl.zeros_like(tile)
    if ctx.config.deterministic:
        turn += turn_at(ctx, number, row // block_m, last)
    return Search(origin, h, block, meets, gl.where(clean, 0, MASKED), turn, gl.to_tensor(-1))


@gluon.jit
def query_tiles(ctx):
    """Query tiles of a head."""
    return (ctx.keys.seq_q + ctx.config.block_m - 1) // ctx.config.block_m


@gluon.jit
def heads_together(ctx):
    """Query heads whose tiles are numbered together."""
    if ctx.config.side_by_side:
        return ctx.keys.group
    else:
        return gl.to_tensor(1)


@gluon.jit
def tile_at(ctx, origin, h, number):
    """(query head, first row) of tile `number`, any shape, of head h; or, side by side, of each row the group's heads
    from h on, and row by row away from tile `origin`, so that CTAs that walk together share what L2 holds:

        number   0 1 2 3   4 5 6 7       tile and head, a group of 4, from the last tile down
                 9 9 9 9   8 8 8 8
                 0 1 2 3   0 1 2 3
    """
    if ctx.config.side_by_side:
        tile = number // ctx.keys.group
        return h + number - tile * ctx.keys.group, gl.maximum(tile - origin, origin - tile) * ctx.config.block_m
    else:
        return h, first_row(ctx, number)


@gluon.jit
def first_row(ctx, tile):
    """First row of a head's query tile number `tile` in the order of this CTA, which begins beside its own keys: CTAs
    that run at once add to different rows of dQ."""
    tiles = query_tiles(ctx)
    if ctx.config.rotate:
        tile = tile + first_tile(ctx)
        tile = gl.where(tile >= tiles, tile - tiles, tile)
    return tile * ctx.config.block_m


@gluon.jit
def first_tile(ctx):
    """The query tile that a CTA begins with where the first ones are spread over all tiles."""
    keys = ctx.keys
    tiles = query_tiles(ctx)
    if ctx.config.deterministic:
        return key_tile(ctx) * tiles // key_tiles(ctx)
    else:
        return gl.minimum(keys.first // ctx.config.block_m, tiles)


@gluon.jit
def turn_at(ctx, number, tile, last):
    """How many CTAs add to this one's sums of query tiles [SEARCH] before it, if their rows see keys up to `last`.

    CTAs add in the order in which they arrive, so that hardly any waits: a CTA begins at the tile beside its own keys,
    where those with later keys have begun and those with earlier keys come later. Without a mask the tiles go round,
    and so do the turns. Where all begin at the last rows, those with earlier keys were launched before, and are ahead.
    """
    n = key_tile(ctx)
    own = sharing(ctx, n)
    if ctx.config.mirrored:
        rows = ctx.work.lap_rows()
        first = n // rows * rows
        down = ctx.work.downward(number, ctx.config)
        seen = gl.minimum((last + ctx.config.block_n - 1) // ctx.config.block_n, gl.where(down, 0, first + rows))
        before = gl.where(down, own, sharing(ctx, first) - 1 - own)  # a number to keep for all tiles, as `seen`'s end
        return sharing(ctx, seen) + before
    elif ctx.config.side_by_side:
        return own
    elif ctx.config.rotate:
        count = key_tiles(ctx)
        begins = ((tile + 1) * count - 1) // query_tiles(ctx)  # the last CTA whose first tile is not behind
        return sharing(ctx, begins + 1) - 1 - own + gl.where(n <= begins, 0, sharing(ctx, count))
    else:
        return sharing(ctx, (last + ctx.config.block_n - 1) // ctx.config.block_n) - 1 - own


@gluon.jit
def key_tiles(ctx):
    """Key tiles of a head."""
    return (ctx.keys.seq_k + ctx.config.block_n - 1) // ctx.config.block_n


@gluon.constexpr_function
def lane_layout():
    """One query tile a lane of the warp."""
    return gl.BlockedLayout([1], [32], [1], [0])
