"""The schedule on the device: maps a CTA's range of the work queue to row tiles, heads and key tiles.

      lengths ──▶ units of every row tile ──▶ Stream-K ranges ──▶ Cursor ──▶ WorkItem: one part of one head
                                                                   ▲             │
                                                                   └── advance ──┘

Every CTA computes the same ranges from the lengths, so that the host need not know the lengths (pieces/stream_k.py).
With several queues, row tile t of every sequence is in queue t % queues.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...pieces.span import TileSpan, tile_span
from ...pieces.stream_k import Cursor, Part, find_row_tile, part_at, partition, partition_heads


@gluon.aggregate
class KeySpan:
    """Keys of a row tile: some row may see [first, last), and all rows see [full_lo, full_hi) unless that is empty."""

    first: gl.tensor
    full_lo: gl.tensor
    full_hi: gl.tensor
    last: gl.tensor


@gluon.aggregate
class RowTile:
    """A tile of query rows of sequence `b` from `row` on, with the sequence's lengths, the tile's span in keys and in
    key tiles, and its units of work."""

    number: gl.tensor
    b: gl.tensor
    row: gl.tensor
    q_start: gl.tensor  # row of the sequence's first query in its tensors
    tokens: gl.tensor  # queries of the sequence, see `tokens_of`
    length: gl.tensor  # keys of the sequence
    keys: KeySpan
    span: TileSpan
    units: gl.tensor  # units of one head


@gluon.aggregate
class WorkItem:
    """One part of one head: key tiles number `begin` up to (without) `end` of the row tile's span."""

    row_tile: RowTile
    part: Part
    padded_units: gl.tensor  # units that a head of the row tile has in the queue, overhead included
    begin: gl.tensor
    end: gl.tensor
    oldest_first: gl.constexpr

    @gluon.jit
    def number(self, i):
        """The key tile's number in the span for the loop index `i` from `begin` to `end`."""
        if self.oldest_first:
            return self.begin + self.end - 1 - i
        else:
            return i

    @gluon.jit
    def key_tile(self, i):
        """The key tile's index in the sequence for the loop index `i`."""
        return self.row_tile.span.key_tile(self.number(i))


@gluon.jit
def next_item(cursor, item, heads):
    """The queue position after an item."""
    cursor = Cursor(cursor.unit, item.row_tile.number, cursor.row_tile_start)  # the cursor's row tile may have no units
    return cursor.advance(item.part.count, item.padded_units * heads)


@gluon.jit
def tokens_of(keys, work, b, inside, config: gl.constexpr):
    """(first query, number of queries, whether decode takes them) of sequences `b`. Decode skips ragged sequences with
    no query or more than `work.tokens` (prefill takes those). Their number is clamped to 1 to `work.tokens`, so that
    the compiler knows it if it can only be 1."""
    if config.schedule.ragged:
        first = gl.load(keys.cu_q + b, mask=inside, other=0, volatile=keys.speculative)
        tokens = gl.load(keys.cu_q + b + 1, mask=inside, other=0, volatile=keys.speculative) - first
        within = gl.minimum(gl.maximum(tokens, 1), 1 if config.schedule.one_token else work.tokens)
        return first, within, tokens == within
    else:
        return b * 0, work.tokens + b * 0, b == b


@gluon.jit
def length_of(keys, work, b, inside, config: gl.constexpr):
    """Number of keys of sequences `b`, any shape; read only where `inside`."""
    if config.schedule.has_lengths:
        length = gl.load(keys.lengths + b, mask=inside, other=0, volatile=keys.speculative)
        return gl.maximum(gl.minimum(length, work.capacity), 0)
    else:
        return work.capacity + b * 0


@gluon.jit
def queue_count(work, config: gl.constexpr):
    """Number of work queues."""
    if config.schedule.one_row_tile:
        return gl.to_tensor(1)
    else:
        return work.queues


@gluon.jit
def row_tiles_of(queue, work):
    """Number of row tiles of a queue."""
    return work.batch * (work.tiles // queue.count)


@gluon.jit
def row_tile_at(number, queue, keys, work, mods, config: gl.constexpr):
    """The `RowTile` with this `number` in a queue, any shape."""
    if config.schedule.one_row_tile:
        tile = number * 0
        b = number
    elif config.tiles_outermost:
        tile = number // work.batch
        b = number - tile * work.batch
    else:
        tiles = work.tiles // queue.count
        b = number // tiles
        tile = number - b * tiles
    tile = tile * queue.count + queue.number
    return row_tile_of(number, b, tile, keys, work, mods, config)


@gluon.jit
def row_tile_of(number, b, tile, keys, work, mods, config: gl.constexpr):
    """The `RowTile` number `tile` of sequence `b`, any shape; `number`: in its queue."""
    row = tile * config.rows
    length = length_of(keys, work, b, b < work.batch, config)
    q_start, tokens, decoded = tokens_of(keys, work, b, b < work.batch, config)
    offset = length - tokens
    q_lo = row // work.group + offset
    q_hi = gl.minimum((row + config.rows - 1) // work.group, tokens - 1) + offset
    keys = mods.span(b, 0, q_lo, q_hi, tokens, length, mods.mask_args)
    span = tile_span(keys, config.block_n)
    units = (span.total + config.schedule.unit - 1) // config.schedule.unit
    if config.schedule.ragged:
        units = gl.where(decoded & (row < tokens * work.group), units, 0)
    return RowTile(number, b, row, q_start, tokens, length, KeySpan(*keys), span, units)


@gluon.jit
def row_tile_from(number, queue, keys, work, mods, config: gl.constexpr):
    """The `RowTile` with this `number`, or, if ragged, the first from there on that has units."""
    row_tile = row_tile_at(number, queue, keys, work, mods, config)
    if config.schedule.ragged:
        while (row_tile.units == 0) & (row_tile.number < row_tiles_of(queue, work) - 1):
            row_tile = row_tile_at(row_tile.number + 1, queue, keys, work, mods, config)
    return row_tile


@gluon.jit
def item_at(ctx, cursor):
    """The work item that starts at queue position `cursor` of this CTA's range."""
    config: gl.constexpr = ctx.config
    if config.schedule.interleave_heads:
        cursor = interleaved(ctx, cursor)
    row_tile = row_tile_from(cursor.row_tile, ctx.queue, ctx.keys, ctx.work, ctx.mods, config)
    padded_units = row_tile.units + ctx.stream_k.head_overhead
    if ctx.keys.speculative:  # lengths that are being written may leave a row tile without units
        padded_units = gl.maximum(padded_units, 1)
    part = part_at(cursor, row_tile.units, padded_units, ctx.stream_k, ctx.queue, config.schedule.invariant)
    begin = part.begin * config.schedule.unit
    end = gl.minimum(begin + part.count * config.schedule.unit, row_tile.span.total)
    return WorkItem(row_tile, part, padded_units, begin, end, config.oldest_first)


@gluon.jit
def interleaved(ctx, cursor):
    """Exchanges the head at a queue position, so that CTAs that run at once have neighbouring heads: the j-th
    head of a CTA, number  cta · whole + j  of the queue, becomes number  cta + j · CTAs.  It does so only if `whole`
    divides the number of heads. All heads have the same number of units."""
    work = ctx.work
    units = row_tile_at(gl.to_tensor(0), ctx.queue, ctx.keys, work, ctx.mods, ctx.config).units
    padded_units = units + ctx.stream_k.head_overhead
    heads = work.batch * work.tiles * work.heads
    ctas = heads // work.whole
    number = cursor.unit // padded_units
    cta = number // work.whole
    other = gl.where(ctas * work.whole == heads, cta + (number - cta * work.whole) * ctas, number)
    row_tile = other // work.heads
    return Cursor(cursor.unit, row_tile, (number - other + row_tile * work.heads) * padded_units)


@gluon.jit
def my_range(queue, keys, work, mods, config: gl.constexpr):
    """(partition, start of this CTA's range); every CTA of a queue computes the same partition."""
    stream_k, cursor = first_unit(queue, keys, work, mods, config)
    if config.schedule.head_overhead > 0:
        number = gl.minimum(cursor.row_tile, row_tiles_of(queue, work) - 1)
        units = row_tile_at(number, queue, keys, work, mods, config).units
        cursor = cursor.skip_overhead(units, units + stream_k.head_overhead, work.heads)
    return stream_k, cursor


@gluon.jit
def first_unit(queue, keys, work, mods, config: gl.constexpr):
    """(partition, queue position of this CTA's first unit)."""
    sums: gl.constexpr = config.schedule.sums
    if sums is None:
        units, stream_k = partition_uniform(queue, keys, work, mods, config)
        row_tile_units = (units + stream_k.head_overhead) * work.heads
        unit = stream_k.first(queue.cta)
        row_tile = unit // row_tile_units
        return stream_k, Cursor(unit, row_tile, row_tile * row_tile_units)
    elif sums.once:
        units = block_units(0, queue, keys, work, mods, config)
        stream_k = partition_block(units, queue, work, config)
        unit = stream_k.first(queue.cta)
        row_tile, start = find_row_tile(unit, gl.cumsum(padded_block(units, stream_k.head_overhead, work), 0))
        return stream_k, Cursor(unit, row_tile, start)
    else:
        stream_k = partition_blocks(queue, keys, work, mods, config)
        unit = stream_k.first(queue.cta)
        row_tile = gl.to_tensor(0)
        start = gl.to_tensor(0)
        seen = gl.to_tensor(0)
        for begin in range(0, row_tiles_of(queue, work), sums.width):
            padded = padded_block(block_units(begin, queue, keys, work, mods, config), stream_k.head_overhead, work)
            passed, reached = find_row_tile(unit, gl.cumsum(padded, 0) + seen)
            row_tile += passed
            start = gl.maximum(start, reached)
            seen += gl.sum(padded, 0)
        return stream_k, Cursor(unit, row_tile, start)


@gluon.jit
def partition_uniform(queue, keys, work, mods, config: gl.constexpr):
    """(units of every head, partition over the CTAs of a queue)."""
    heads = row_tiles_of(queue, work) * work.heads
    units = row_tile_at(gl.to_tensor(0), queue, keys, work, mods, config).units
    plain = partition(units * heads, queue.ctas(), gl.to_tensor(0))
    invariant: gl.constexpr = config.schedule.invariant
    return units, partition_heads(plain, heads, units, queue.ctas(), work, config.max_growth, invariant)


@gluon.jit
def partition_block(units, queue, work, config: gl.constexpr):
    """The partition over the CTAs of a queue, where one block holds the `units` of all row tiles."""
    row_tiles = row_tiles_of(queue, work)
    overhead = gl.to_tensor(config.schedule.head_overhead)
    total = gl.sum(units, 0)
    most = gl.max(units, 0)
    splits, whole = work.splits, work.whole
    if config.schedule.ragged:  # only row tiles with units count
        with_units = gl.sum((units > 0).to(gl.int32), 0)
        if with_units < row_tiles:
            splits, whole = even_cut(with_units * work.heads, queue.ctas())
        row_tiles = with_units
    cut = EvenCut(splits, whole)
    plain = partition((total + row_tiles * overhead) * work.heads, queue.ctas(), overhead)
    invariant: gl.constexpr = config.schedule.invariant
    even = partition_heads(plain, row_tiles * work.heads, most, queue.ctas(), cut, config.max_growth, invariant)
    return plain.unless(total == most * row_tiles, even)


@gluon.aggregate
class EvenCut:
    """An even partition, as `choice.EvenCut` on the host."""

    splits: gl.tensor
    whole: gl.tensor


@gluon.jit
def even_cut(heads, ctas):
    """(splits, whole) of the even partition that keeps `ctas` CTAs busy with `heads` heads of equal length, as
    `choice.even_cut` on the host."""
    splits = gl.maximum(ctas // gl.maximum(heads, 1), 1)
    return splits, gl.where(splits == 1, (heads + ctas - 1) // ctas, 1)


@gluon.jit
def partition_blocks(queue, keys, work, mods, config: gl.constexpr):
    """The partition over the CTAs of a queue, where row tiles take several blocks. With so many heads it hardly matters
    where ranges end."""
    overhead = gl.to_tensor(config.schedule.head_overhead)
    total = gl.to_tensor(0)
    for begin in range(0, row_tiles_of(queue, work), config.schedule.sums.width):
        total += gl.sum(padded_block(block_units(begin, queue, keys, work, mods, config), overhead, work), 0)
    return partition(total, queue.ctas(), overhead)


@gluon.jit
def block_units(begin, queue, keys, work, mods, config: gl.constexpr):
    """Units of one head of each row tile of a block: 0 for row tiles past the last and for those of ragged sequences
    without a query there, else at least 1."""
    sums: gl.constexpr = config.schedule.sums
    number = begin + gl.arange(0, sums.width, gl.BlockedLayout([sums.lane], [32], [config.attending_warps], [0]))
    units = row_tile_at(number, queue, keys, work, mods, config).units
    return gl.where(number < row_tiles_of(queue, work), units, 0)


@gluon.jit
def padded_block(units, overhead, work):
    """Units that all heads of each row tile of a block have in the queue, overhead included."""
    return gl.where(units > 0, units + overhead, 0) * work.heads
