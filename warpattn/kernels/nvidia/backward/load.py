"""The producer warp of a backward: fetches key tiles, finds the query tiles that see them, and loads K, V, Q and dO.
While gradients of a key tile are stored, it loads Q and dO for the next one, and K and V once they are free.

A mask's span gives the keys of a row tile, but here the keys are given and the rows are wanted. So the warp evaluates
the spans of 32 query tiles at once, one per lane, and visits those that contain some of the keys: this is exact for
every mask. With each slot, the other roles get the tile's first row, whether it needs the mask, and whether another
one follows. Tiles come head after head, or the heads of a group side by side (`tile_at`).

      key tile n           rows 0..63   rows 64..127  ...     lanes of one test
      bounds of the rows   [a, b)       [c, d)                meets: first < n end and n begin < last
                                                              masked: not inside of [full_lo, full_hi)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ...pieces.scheduler import LANES, fetch_next, resolve_next
from ..pipelines import PipelineState
from . import arguments as sizes
from .turns import key_tile, sharing
from .visits import FIRST, MASKED, MORE, STAGES, Visit, at_number, hidden_zero, publish_end, publish_visit

SEARCH = gl.constexpr(sizes.SEARCH)
BEHIND = gl.constexpr(sizes.BEHIND)


@gluon.aggregate
class Search:
    """The state of the search for query tiles: the tests of a block of tiles, a bit for each."""

    h: gl.base_value  # query head; None with heads side by side, which are those of the key head
    block: gl.tensor  # number of the block's first tile, counted as in `tile_at`
    meets: gl.tensor  # int32 bits: tiles that see the keys and are still to be visited
    masked: gl.tensor  # int32 bits: tiles that need the mask
    turn: gl.base_value  # [SEARCH], if gradients are deterministic


@gluon.jit
def load_role(ctx):
    """Loads key tiles until none is left, and publishes that."""
    visits = gl.to_tensor(0)  # so far: this and the next number tell the slots in all rings, in two registers
    keys = gl.to_tensor(0)
    number = first_number(ctx)
    more = number < ctx.work.total()
    while more:
        visits, number, more = load_tiles(at_number(ctx, number, visits), visits, keys, number)
        keys += 1
    if ctx.config.persistent:
        announce_end(ctx, slot_of(visits, STAGES))


@gluon.jit
def first_number(ctx):
    """The number of a CTA's first key tile. CTAs that add in turns take this from the counter, too: they wait for CTAs
    with smaller numbers, all of which run then."""
    if ctx.config.persistent and ctx.config.deterministic:
        return resolve_turn(ctx.tensors.counter, ctx.work, fetch_next(ctx.tensors.counter, ctx.work, 0))
    else:
        return gl.program_id(0)


@gluon.jit
def resolve_turn(counter, work, taken):
    """`resolve_next` where all numbers are the counter's: so each CTA gets one past the end."""
    total = work.total()
    taken = gl.max(gl.where(gl.arange(0, 32, LANES) == 0, taken, 0), 0)
    last = total + gl.minimum(gl.num_programs(0), total) - 1
    gl.atomic_xchg(counter, 0, mask=taken == last, sem="relaxed")
    return taken


@gluon.jit
def slot_of(count, stages: gl.constexpr):
    """The state of the producer that has filled `count` slots of a ring of one or two."""
    return PipelineState(count & (stages - 1), count >> (stages - 1) & 1 ^ 1, stages)


@gluon.jit
def load_tiles(ctx, visits, keys, number):
    """Loads K and V of a key tile, and every query tile that sees its keys; returns (the number of visits so far, the
    next key tile's number, whether there is one)."""
    k_state, v_state = slot_of(keys, ctx.config.key_stages), slot_of(keys, 1)
    search, visit = next_visit(ctx, first_search(ctx, number, hidden_zero(visits)))
    visit = at_least_one(visit)
    load_queries(ctx, slot_of(visits, STAGES), visit)
    ctx.rings.k.producer_acquire(k_state)
    load_keys(ctx, ctx.tensors.k, ctx.rings.k, k_state, visit, ctx.config.padded_qk)
    search, following = next_visit(ctx, search)  # while Q is in flight
    announce(ctx, slot_of(visits, STAGES), visit, following)
    if ctx.config.key_stages > 1:  # otherwise V is free: it was read before the last dS, and K after that
        ctx.rings.v.producer_acquire(v_state)
    load_keys(ctx, ctx.tensors.v, ctx.rings.v, v_state, visit, ctx.config.padded_v)
    while following.row >= 0:
        load_output_gradients(ctx, slot_of(visits, STAGES), visit)
        visits += 1
        visit = following
        load_queries(ctx, slot_of(visits, STAGES), visit)
        search, following = next_visit(ctx, search)
        announce(ctx, slot_of(visits, STAGES), visit, following)
    if ctx.config.persistent:
        counter, work = ctx.tensors.counter + hidden_zero(visits), ctx.work.computed_anew(visits)
        taken = fetch_next(counter, work, 0 if ctx.config.deterministic else number)  # arrives while dO is loaded
        load_output_gradients(ctx, slot_of(visits, STAGES), visit)
        if ctx.config.deterministic:
            number = resolve_turn(counter, work, taken)
        else:
            number = resolve_next(counter, work, number, taken)
        return visits + 1, number, number < work.total()
    else:
        load_output_gradients(ctx, slot_of(visits, STAGES), visit)
        return visits + 1, number, gl.to_tensor(False)


@gluon.jit
def load_queries(ctx, state, visit):
    """Loads Q and the rows' shifts."""
    load_rows(ctx, (ctx.tensors.q, ctx.tensors.shift), ctx.rings.q, ctx.rings.shift, state, visit)


@gluon.jit
def load_output_gradients(ctx, state, visit):
    """Loads dO and the rows' deltas. Hopper's wait for the slot never waits, because roles release Q's after dO's; but
    without it the kernel is 1 to 3 % slower at head dims 128 and 256 (H200, bench/notes.md 264)."""
    load_rows(ctx, (ctx.tensors.do, ctx.tensors.delta), ctx.rings.do, ctx.rings.delta, state, visit)


@gluon.jit
def at_least_one(visit):
    """The first visit of a key tile. If no query tile sees the keys, it is a visit of rows and keys past the end: TMA
    loads zeros, all hidden, so that gradients are zeros, and clips what is added to dQ."""
    none = visit.row < 0
    row, flags = gl.where(none, BEHIND, visit.row), gl.where(none, MASKED, visit.flags)
    return Visit(visit.b, visit.h, row, flags, visit.turn)


@gluon.jit
def first_key(ctx, visit):
    """The first key of a visit."""
    return ctx.keys.first + (visit.row & BEHIND)


@gluon.jit
def announce_end(ctx, state):
    """Publishes that no keys are left, by a slot without a tile."""
    full = ctx.rings.q.producer_acquire(state)
    publish_end(ctx, state)
    mbarrier.arrive(full, count=2)
    if ctx.config.reduces:
        full = ctx.rings.ds.producer_acquire(state)  # for `reduce`, which no dS reaches
        mbarrier.arrive(full, count=4 * ctx.config.key_parts)


@gluon.jit
def load_keys(ctx, source, ring, state, visit, cols: gl.constexpr):
    """Loads the CTA's K or V, `cols` columns, in parts."""
    keys = ctx.keys
    full = ring.full(state.index)
    mbarrier.expect(full, ctx.config.key_bytes(cols))
    parts: gl.constexpr = ctx.config.key_parts
    boxes: gl.constexpr = ring.parts // parts
    for part in gl.static_range(parts):
        row = first_key(ctx, visit) + part * ctx.config.rows
        for box in gl.static_range(boxes):
            smem = ring.tile(state, part * boxes + box)
            source.load(keys.k_start, keys.seq_k, row, keys.h, full, smem, box * smem.shape[-1])


@gluon.jit
def load_rows(ctx, sources, ring, numbers, state, visit):
    """Loads a tile of Q or dO, and its shift or delta, into the next slot."""
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
    """Publishes a visit and whether another one follows; this is the second arrival on the Q slot's full barrier."""
    flags = visit.flags | gl.where(following.row >= 0, MORE, 0) | (first_key(ctx, visit) << FIRST)
    publish_visit(ctx, state, Visit(visit.b, visit.h, visit.row, flags, visit.turn))
    mbarrier.arrive(ctx.rings.q.full(state.index), count=1)


@gluon.jit
def first_search(ctx, number, block):
    """The search before the first tile of the first query head. `block`: 0, see `hidden_zero`."""
    if ctx.config.side_by_side:
        block -= gl.where(ctx.work.downward(number, ctx.config), tiles_together(ctx), 0)
        return search_block(ctx, None, block)
    else:
        return search_block(ctx, ctx.keys.h * ctx.keys.group, block)


@gluon.jit
def next_visit(ctx, search):
    """(search, visit): the next query tile that sees the keys; its row is -1 if there is none."""
    keys = ctx.keys
    while (search.meets == 0) & not_ended(ctx, search):
        search = next_block(ctx, search)
    lowest = search.meets & -search.meets
    flags = gl.where((search.masked & lowest) != 0, MASKED, 0)
    found = bit_number(lowest)
    h, row = tile_at(ctx, search.h, search.block + found)
    row = gl.where((search.meets != 0) & not_ended(ctx, search), row, -1)
    turn = gl.to_tensor(0)
    if ctx.config.deterministic:
        turn = gl.sum(gl.where(gl.arange(0, SEARCH, lane_layout()) == found, search.turn, 0), 0)
    rest = search.meets - lowest
    following = Search(search.h, search.block, rest, search.masked, search.turn)
    return following, Visit(keys.b, h, row, flags, turn)


@gluon.jit
def not_ended(ctx, search):
    """Whether the block is one of the tiles of the key head."""
    if ctx.config.side_by_side:
        return search.block < tiles_together(ctx)
    else:
        return search.h < (ctx.keys.h + 1) * ctx.keys.group


@gluon.jit
def next_block(ctx, search):
    """The search of the next SEARCH tiles, of the next head if there are none."""
    block = search.block + SEARCH
    if ctx.config.side_by_side:
        block = gl.where((search.block < 0) & (block >= 0), tiles_together(ctx), block)
        return search_block(ctx, None, block)
    else:
        done = block >= tiles_together(ctx)
        h = search.h + gl.where(done, 1, 0)
        return search_block(ctx, h, gl.where(done, 0, block))


@gluon.jit
def bit_number(bit):
    """The number of the only bit that is set in `bit`, by the exponent of that as a float."""
    return gl.maximum((bit.to(gl.float32).to(gl.int32, bitcast=True) >> 23 & 255) - 127, 0)


@gluon.jit
def as_bits(lanes):
    """A bit for each of [SEARCH] lanes, as one int32."""
    return gl.sum(gl.where(lanes, 1 << gl.arange(0, SEARCH, lane_layout()), 0), 0)


@gluon.jit
def search_block(ctx, h, block):
    """Tests the spans of SEARCH query tiles, of one head or of heads side by side, from tile number `block` on."""
    keys = ctx.keys
    block_m: gl.constexpr = ctx.config.block_m
    tile = block + gl.arange(0, SEARCH, lane_layout())
    its_h, row = tile_at(ctx, h, tile)
    offset = keys.seq_k - keys.seq_q
    q_lo = row + offset
    q_hi = gl.minimum(row + block_m, keys.seq_q) - 1 + offset
    mods = ctx.mods
    first, full_lo, full_hi, last = mods.span(keys.b, its_h, q_lo, q_hi, keys.seq_q, keys.seq_k, mods.mask_args)
    end = keys.first + ctx.config.block_n
    there = tile < gl.where(block < 0, 0, tiles_together(ctx))
    meets = there & (first < end) & (keys.first < last)
    clean = (full_lo <= keys.first) & (end <= full_hi) & (row >= 0)
    if ctx.mods.score is not None:
        clean = clean & (row + block_m <= keys.seq_q)
    turn = None
    if ctx.config.deterministic:
        turn = turn_at(ctx, block, row // block_m, last)
    return Search(h, block, as_bits(meets), as_bits(meets & (clean == 0)), turn)


@gluon.jit
def query_tiles(ctx):
    """Query tiles of a head."""
    return (ctx.keys.seq_q + ctx.config.block_m - 1) // ctx.config.block_m


@gluon.jit
def tiles_together(ctx):
    """Query tiles that are numbered together: of a head, or of heads side by side."""
    if ctx.config.side_by_side:
        return query_tiles(ctx) * ctx.keys.group
    else:
        return query_tiles(ctx)


@gluon.jit
def tile_at(ctx, h, number):
    """(query head, first row) of tile `number`, any shape, of head h. With heads side by side: all heads of the group
    from h on, then the next row, so that CTAs that run together read the same tiles from L2. Numbers are negative if
    the walk goes down, which then ends with -1:

        number   -40 -39 -38 -37   -36 -35 -34 -33   ...    tile and head, 10 tiles, a group of 4
                   9   9   9   9     8   8   8   8
                   0   1   2   3     0   1   2   3
    """
    if ctx.config.side_by_side:
        down = number >> 31  # -1 or 0
        tile = (number ^ down) // ctx.keys.group
        return (ctx.keys.h - (tile ^ down)) * ctx.keys.group + number, tile * ctx.config.block_m
    else:
        return h, first_row(ctx, number)


@gluon.jit
def first_row(ctx, tile):
    """First row of query tile number `tile` of a head in this CTA's order, which begins beside its own keys, so that
    CTAs that run at once add to different rows of dQ."""
    tiles = query_tiles(ctx)
    if ctx.config.rotate:
        tile = tile + first_tile(ctx)
        tile = gl.where(tile >= tiles, tile - tiles, tile)
    return tile * ctx.config.block_m


@gluon.jit
def first_tile(ctx):
    """The query tile with which a CTA begins if CTAs begin at different tiles (`rotate`)."""
    keys = ctx.keys
    tiles = query_tiles(ctx)
    if ctx.config.deterministic:
        return key_tile(ctx) * tiles // key_tiles(ctx)
    else:
        return gl.minimum(keys.first // ctx.config.block_m, tiles)


@gluon.jit
def turn_at(ctx, block, tile, last):
    """This CTA's turn at query tiles [SEARCH] whose rows see keys up to `last`: how many CTAs add to its sum first.

    Turns follow the order in which CTAs reach a tile, so that hardly any waits. A CTA begins at the tile beside its own
    keys, after CTAs with later keys and before those with earlier ones. Without a mask tiles go round, and so do turns.
    Where all CTAs begin at the last rows, those with earlier keys were launched first and are ahead.
    """
    n = key_tile(ctx)
    own = sharing(ctx, n)
    if ctx.config.mirrored:
        rows = ctx.work.shape.lap_rows
        first = n // rows * rows
        seen = gl.minimum((last + ctx.config.block_n - 1) // ctx.config.block_n, first + rows)
        return gl.where(block < 0, own, sharing(ctx, seen) + sharing(ctx, first) - 1 - own)
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
    """The layout with one query tile per lane."""
    return gl.BlockedLayout([1], [32], [1], [0])
