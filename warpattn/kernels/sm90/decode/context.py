"""What both roles of the Hopper decode kernel can see, and the walk along a CTA's share of the keys.

A row of a 64-row tile is one query: row r of a key head is token r // group of query head  head * group + r % group.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...nvidia.pipelines import StagedPipeline, make_pipeline
from ...pieces.combine import Partials
from ...pieces.modifiers import Modifiers
from ...pieces.span import TileSpan, tile_span
from ...pieces.stream_k import Part, Place, Shares, find_place, part_at, share_heads, share_out
from ..layouts import element_type, tile_layout


@gluon.aggregate
class Grid:
    """Sizes of the problem, int32. An entry is a row tile of a sequence."""

    batch: gl.tensor
    tokens: gl.tensor  # query tokens of a sequence
    capacity: gl.tensor  # most keys of a sequence
    heads: gl.tensor  # key heads
    group: gl.tensor  # query heads per key head
    tiles: gl.tensor  # row tiles of a key head
    pages: gl.tensor  # of the cache
    page_size: gl.tensor
    splits: gl.tensor  # equal parts of a head, or
    whole: gl.tensor  # heads of a CTA: see `share_heads`


@gluon.jit
def grid_of(shape):
    """A grid from the kernels' `shape` argument, which has its fields in order."""
    return Grid(shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], shape[6], shape[7], shape[8], shape[9])


@gluon.aggregate
class Matrix:
    """A (batch, tokens, heads, dim) tensor in global memory: strides of the first three in units of 8 elements."""

    pointer: gl.tensor
    batch: gl.tensor
    token: gl.tensor
    head: gl.tensor

    @gluon.jit
    def rows(self, b, token, head):
        """Pointers to the first element of each (token, head)."""
        at = gl.to_tensor(b).to(gl.int64) * self.batch + token.to(gl.int64) * self.token
        return self.pointer + (at + head.to(gl.int64) * self.head) * 8


@gluon.aggregate
class Keys:
    """Keys and values (batch or page, row, head, dim), lengths, and the table of pages. `k` and `v` are (descriptor,)
    or, where rows are gathered, what a `Matrix` is made of."""

    k: gl.tuple
    v: gl.tuple
    lengths: gl.tensor  # int32* (batch,)
    table: gl.tensor  # int32* (batch, row of `table_stride`)
    table_stride: gl.tensor
    guessed: gl.constexpr  # lengths and table are read though they may be being written: see decode/prefetch.py

    @gluon.jit
    def now(self):
        """The same for a guess. Its reads must not leave in L1 what those behind the wait would then find."""
        return Keys(self.k, self.v, self.lengths, self.table, self.table_stride, True)


@gluon.aggregate
class Results:
    out: Matrix
    lse: gl.tensor  # float* (batch, heads_q, tokens)
    sinks: gl.tensor  # float* (heads_q,)
    partials: Partials
    tickets: gl.tensor  # int32* (entries, heads): parts of a head that are done; 0 between launches


@gluon.aggregate
class DecodeRings:
    k: StagedPipeline  # [stages, 1, N, 1, D]
    v: StagedPipeline  # [stages, 1, N, 1, Dv]
    q: gl.shared_memory_descriptor  # [64, D], of the warpgroup alone


@gluon.aggregate
class DecodeContext:
    q: Matrix
    keys: Keys
    results: Results
    rings: DecodeRings
    work: Grid
    mods: Modifiers
    shares: Shares
    start: Place  # where this CTA's run begins
    end: gl.tensor
    scale: gl.tensor
    config: gl.constexpr
    has_sinks: gl.constexpr
    has_lse: gl.constexpr


@gluon.aggregate
class Entry:
    """A row tile of a sequence: `b`, its first row, the length of the sequence, its key tiles and units."""

    b: gl.tensor
    row: gl.tensor
    length: gl.tensor
    span: TileSpan
    units: gl.tensor  # of one head


@gluon.aggregate
class Item:
    """One part of one head: key tiles `begin` to `end` of the entry's span, by the numbers it visits them as."""

    entry: Entry
    part: Part
    room: gl.tensor  # units that a head of the entry takes in the line, with its price
    begin: gl.tensor
    end: gl.tensor
    backwards: gl.constexpr

    @gluon.jit
    def number(self, i):
        """The number in the span of the key tile that is visited as number `i` of `begin` to `end`: the same, or
        backwards, so that new tokens come last."""
        if self.backwards:
            return self.begin + self.end - 1 - i
        else:
            return i

    @gluon.jit
    def key_tile(self, i):
        """Index of the key tile that is visited as number `i`."""
        return self.entry.span.key_tile(self.number(i))


@gluon.aggregate
class Lens:
    """Lengths of one sequence, by the names that `Modifiers` reads."""

    seq_q: gl.tensor
    seq_k: gl.tensor


@gluon.aggregate
class Rows:
    """Where rows of a tile are: sequence, query head [M, 1], token [M, 1]."""

    b: gl.tensor
    h: gl.tensor
    token: gl.tensor


@gluon.jit
def rows_of(ctx, item, row):
    """Places of rows `row` of the item's tile, any shape; rows past the last get the last token's."""
    work = ctx.work
    number = item.entry.row + row
    token = number // work.group
    head = item.part.head * work.group + number - token * work.group
    return Rows(item.entry.b, head, gl.minimum(token, work.tokens - 1))


@gluon.jit
def length_of(keys, work, b, inside, config: gl.constexpr):
    """Keys of sequence `b`; numbers of sequences or a block of them, read where `inside`."""
    if config.has_lengths:
        length = gl.load(keys.lengths + b, mask=inside, other=0, volatile=keys.guessed)
        return gl.maximum(gl.minimum(length, work.capacity), 0)
    else:
        return work.capacity + b * 0


@gluon.jit
def describe(number, keys, work, mods, config: gl.constexpr):
    """The entry of a number (or of a block of numbers)."""
    if config.one_tile:
        tile = number * 0
        b = number
    elif config.tiles_outermost:
        tile = number // work.batch
        b = number - tile * work.batch
    else:
        b = number // work.tiles
        tile = number - b * work.tiles
    row = tile * config.rows
    length = length_of(keys, work, b, b < work.batch, config)
    offset = length - work.tokens
    q_lo = row // work.group + offset
    q_hi = gl.minimum((row + config.rows - 1) // work.group, work.tokens - 1) + offset
    span = tile_span(mods.span(b, 0, q_lo, q_hi, work.tokens, length, mods.mask_args), config.block_n)
    units = (span.total + config.unit - 1) // config.unit
    return Entry(b, row, length, span, units)


@gluon.jit
def item_at(ctx, place):
    """The item that starts at a place."""
    config: gl.constexpr = ctx.config
    if config.spread:
        place = spread_place(ctx, place)
    entry = describe(place.entry, ctx.keys, ctx.work, ctx.mods, config)
    room = entry.units + ctx.shares.price
    part = part_at(place, entry.units, room, ctx.shares, gl.program_id(0), config.invariant)
    begin = part.begin * config.unit
    end = gl.minimum(begin + part.count * config.unit, entry.span.total)
    return Item(entry, part, room, begin, end, config.settled)


@gluon.jit
def spread_place(ctx, place):
    """The place with the head there replaced by another one, so that CTAs which run at the same time have neighbouring
    heads: head number  cta · whole + j  of the line, the j-th of a CTA, becomes number  cta + j · CTAs.  Only if
    `whole` divides the number of heads. All heads have equally many units."""
    work = ctx.work
    room = describe(gl.to_tensor(0), ctx.keys, work, ctx.mods, ctx.config).units + ctx.shares.price
    heads = work.batch * work.tiles * work.heads
    ctas = heads // work.whole
    number = place.unit // room
    cta = number // work.whole
    other = gl.where(ctas * work.whole == heads, cta + (number - cta * work.whole) * ctas, number)
    entry = other // work.heads
    return Place(place.unit, entry, (number - other + entry * work.heads) * room)


@gluon.jit
def take_share(keys, work, mods, config: gl.constexpr):
    """(shares, place where this CTA's run begins); every CTA finds the same shares."""
    shares, place = cut_line(keys, work, mods, config)
    if config.price > 0:
        number = gl.minimum(place.entry, work.batch * work.tiles - 1)
        units = describe(number, keys, work, mods, config).units
        place = place.past_price(units, units + shares.price, work.heads)
    return shares, place


@gluon.jit
def cut_line(keys, work, mods, config: gl.constexpr):
    """(shares, place of this CTA's first unit)."""
    cta = gl.program_id(0)
    parts = gl.num_programs(0)
    entries = work.batch * work.tiles
    if config.uniform:
        units, shares = share_uniform(parts, keys, work, mods, config)
        room = (units + shares.price) * work.heads
        unit = shares.first(cta)
        entry = unit // room
        return shares, Place(unit, entry, entry * room)
    elif config.plan_once:
        units = block_units(0, keys, work, mods, config)
        shares = share_block(units, parts, work, config)
        unit = shares.first(cta)
        entry, before = find_place(unit, gl.cumsum(block_room(units, shares.price, work), 0))
        return shares, Place(unit, entry, before)
    else:
        shares = share_blocks(parts, keys, work, mods, config)
        unit = shares.first(cta)
        entry = gl.to_tensor(0)
        before = gl.to_tensor(0)
        seen = gl.to_tensor(0)
        for begin in range(0, entries, config.plan_width):
            room = block_room(block_units(begin, keys, work, mods, config), shares.price, work)
            passed, reached = find_place(unit, gl.cumsum(room, 0) + seen)
            entry += passed
            before = gl.maximum(before, reached)
            seen += gl.sum(room, 0)
        return shares, Place(unit, entry, before)


@gluon.jit
def share_uniform(parts, keys, work, mods, config: gl.constexpr):
    """(units of every head, shares over `parts` CTAs)."""
    heads = work.batch * work.tiles * work.heads
    units = describe(gl.to_tensor(0), keys, work, mods, config).units
    plain = share_out(units * heads, parts, gl.to_tensor(0))
    return units, share_heads(plain, heads, units, parts, (work.splits, work.whole), config.growth)


@gluon.jit
def share_block(units, parts, work, config: gl.constexpr):
    """Shares over `parts` CTAs where one block has the `units` of all entries."""
    entries = work.batch * work.tiles
    price = gl.to_tensor(config.price)
    total = gl.sum(units, 0)
    most = gl.max(units, 0)
    shares = share_out((total + entries * price) * work.heads, parts, price)
    even = share_heads(shares, entries * work.heads, most, parts, (work.splits, work.whole), config.growth)
    return shares.unless(total == most * entries, even)


@gluon.jit
def share_blocks(parts, keys, work, mods, config: gl.constexpr):
    """Shares over `parts` CTAs where it takes several blocks: so many heads that it hardly matters where they end."""
    price = gl.to_tensor(config.price)
    total = gl.to_tensor(0)
    for begin in range(0, work.batch * work.tiles, config.plan_width):
        total += gl.sum(block_room(block_units(begin, keys, work, mods, config), price, work), 0)
    return share_out(total, parts, price)


@gluon.jit
def block_units(begin, keys, work, mods, config: gl.constexpr):
    """Units of one head of each of `plan_width` entries: at least 1, but 0 for those past the last."""
    number = begin + gl.arange(0, config.plan_width, gl.BlockedLayout([config.plan_lane], [32], [4], [0]))
    units = describe(number, keys, work, mods, config).units
    return gl.where(number < work.batch * work.tiles, units, 0)


@gluon.jit
def block_room(units, price, work):
    """What all heads of a block of entries take in the line."""
    return gl.where(units > 0, units + price, 0) * work.heads


@gluon.jit
def make_decode_rings(config: gl.constexpr):
    """Allocate shared memory and initialise every barrier."""
    dtype: gl.constexpr = element_type(config.element)
    k_layout: gl.constexpr = tile_layout(config.block_n, config.padded_qk, dtype)
    v_layout: gl.constexpr = tile_layout(config.block_n, config.padded_v, dtype)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([config.rows, config.padded_qk], dtype)
    k = gl.allocate_shared_memory(dtype, [config.stages, 1, config.block_n, 1, config.padded_qk], k_layout)
    v = gl.allocate_shared_memory(dtype, [config.stages, 1, config.block_n, 1, config.padded_v], v_layout)
    q = gl.allocate_shared_memory(dtype, [config.rows, config.padded_qk], q_layout)
    return DecodeRings(make_pipeline(k, 1, config.stages), make_pipeline(v, 1, config.stages), q)
