"""The producer warp of Hopper's latent attention: loads rotary parts into one ring and halves of latents into another.
Latents are loaded once for keys and values. Boxes, pages, clamping and copies are those of decode (decode/load.py).

Values past the end of a sequence must be 0, because a weight of 0 times NaN is NaN. In decode, and with swap-AB, the
consumer warpgroup zeroes them in its own V tile. Where two warpgroups read a tile, the producer zeroes it before either
does: the copies of both halves complete a barrier of the producer's own, and it then arrives on each half's full
barrier. Such a tile is the first one of a work item, and the copies of the next tile are in flight meanwhile.

      tile 0   load ──▶ landed ─────────────▶ clear rows past the end ─▶ arrive on full(0)
      tile 1            load ──▶ full(1)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...nvidia.pipelines import producer_state
from ..decode.context import matrix
from ..decode.load import copy_boxes, find_boxes, in_cache, load_boxes, page_of, scale_pages
from ..decode.schedule import item_at, next_item
from .context import half_tile, rope_tile, tile_slots
from .eight_bit_swap_ab import copy_latent_scales

EIGHT_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [1, 1], [1, 0]))  # of the producer warp, four lanes a row


@gluon.jit
def load_tiles(ctx):
    """Loads every tile of this CTA's range, in order."""
    slots = tile_slots(ctx.config, producer_state)
    cleared = gl.to_tensor(0)  # number of tiles that the producer has zeroed rows of
    cursor = ctx.start
    while cursor.unit < ctx.end:
        item = item_at(ctx, cursor)
        if ctx.config.clears:
            slots, cleared = load_ended_item(ctx, slots, item, cleared)
        else:
            slots = load_item(ctx, slots, item)
        cursor = next_item(cursor, item, ctx.work.heads)


@gluon.jit
def load_item(ctx, slots, item):
    """Loads every tile of an item into the next slots; returns the slots of the next tile."""
    if ctx.config.gathers:
        for i in range(item.begin, item.end):
            slots = gather_tile(ctx, slots, item, i)
    else:
        boxes = find_boxes(ctx, item, item.begin)
        pages = scale_pages(ctx, item, item.begin)
        for i in range(item.begin, item.end):
            later = gl.minimum(i + 1, item.end - 1)
            following, later_pages = find_boxes(ctx, item, later), scale_pages(ctx, item, later)
            if ctx.config.latents is not None:
                copy_latent_scales(ctx, slots.rope, item, i, pages)
            slots = load_tile(ctx, slots, item, boxes, False)
            boxes, pages = following, later_pages
    return slots


@gluon.jit
def load_ended_item(ctx, slots, item, cleared):
    """`load_item` that also zeroes latents past the end of the sequence; also returns the new count of `cleared`."""
    config: gl.constexpr = ctx.config
    valid = item.row_tile.length - item.key_tile(item.begin) * config.block_n
    clear = valid < config.block_n
    first = slots
    boxes = find_boxes(ctx, item, item.begin)
    for i in range(item.begin, item.end + 1):
        if i < item.end:
            following = find_boxes(ctx, item, gl.minimum(i + 1, item.end - 1))
            slots = load_tile(ctx, slots, item, boxes, clear & (i == item.begin))
            boxes = following
        if clear & (i == item.begin + 1):
            mbarrier.wait(landed(ctx.rings.v), cleared & 1)
            clear_rows(ctx, first.left, valid)
            clear_rows(ctx, first.right, valid)
            fence_async_shared()
            mbarrier.arrive(ctx.rings.v.full(first.left.index), count=1)
            mbarrier.arrive(ctx.rings.v.full(first.right.index), count=1)
    return slots, cleared + clear.to(gl.int32)


@gluon.jit
def landed(ring):
    """The producer's own barrier, for both halves of a tile to be zeroed."""
    return ring.bars.index(2 * ring.stages)


@gluon.jit
def clear_rows(ctx, slot, valid):
    """Zeroes the rows of half a tile from `valid` on."""
    row = gl.arange(0, 8, gl.SliceLayout(1, EIGHT_ROWS))[:, None]
    tile = half_tile(ctx, slot)
    blocks: gl.constexpr = ctx.config.block_n // 8
    for block in gl.static_range(blocks):
        if block * 8 + 8 > valid:
            rows = tile.slice(block * 8, 8, 0)
            found = rows.load(EIGHT_ROWS)
            rows.store(gl.where(block * 8 + row < valid, found, gl.zeros_like(found)))


@gluon.jit
def load_tile(ctx, slots, item, boxes, clear):
    """Loads a key tile. If the producer will `clear` rows of its latents, they complete the producer's own barrier."""
    if ctx.config.swap_ab:  # its rotary slots are free after the scores; otherwise only after P was read
        load_rope(ctx, slots.rope, item, boxes)
    load_half(ctx, slots.left, item, boxes, 0, clear)
    load_half(ctx, slots.right, item, boxes, ctx.config.half, clear)
    if not ctx.config.swap_ab:
        load_rope(ctx, slots.rope, item, boxes)
    return slots.step()


@gluon.jit
def load_rope(ctx, slot, item, boxes):
    """Loads the rotary part of a tile into a slot."""
    config: gl.constexpr = ctx.config
    load_boxes(ctx, ctx.keys.k.desc, ctx.rings.k, slot, item, boxes, config.rope_bytes, config.rope_column)


@gluon.jit
def load_half(ctx, slot, item, boxes, column: gl.constexpr, clear):
    """Loads half of a tile's latents, from `column` on."""
    config: gl.constexpr = ctx.config
    ring = ctx.rings.v
    full = ring.producer_acquire(slot)
    if config.clears:
        full = ring.bars.index(gl.where(clear, 2 * ring.stages, slot.index))
    copy_boxes(ctx, ctx.keys.v.desc, ring.tile(slot), full, item, boxes, config.half_bytes, column)


@gluon.jit
def gather_tile(ctx, slots, item, i):
    """Loads key tile number `i` from pages that no TMA box divides."""
    rings = ctx.rings
    rope = rings.k.producer_acquire(slots.rope)
    left = rings.v.producer_acquire(slots.left)
    right = rings.v.producer_acquire(slots.right)
    gather_parts(ctx, item, i, half_tile(ctx, slots.left), half_tile(ctx, slots.right), rope_tile(ctx, slots.rope))
    mbarrier.arrive(rope, count=1)
    mbarrier.arrive(left, count=1)
    mbarrier.arrive(right, count=1)
    return slots.step()


@gluon.jit
def gather_parts(ctx, item, i, left, right, rope):
    """Copies both halves of the latents of key tile number `i`, and its rotary part, 8 rows at a time; rows past the
    end repeat the last one."""
    config: gl.constexpr = ctx.config
    first = item.key_tile(i) * config.block_n
    blocks: gl.constexpr = config.block_n // 8
    for block in gl.static_range(blocks):
        row = first + block * 8 + gl.arange(0, 8, gl.SliceLayout(1, EIGHT_ROWS))
        page, rest = page_of(ctx, item, gl.maximum(gl.minimum(row, item.row_tile.length - 1), 0))
        page = in_cache(ctx, page)
        gather_rows(ctx.keys.v, left.slice(block * 8, 8, 0), page, rest, item.part.head, 0)
        gather_rows(ctx.keys.v, right.slice(block * 8, 8, 0), page, rest, item.part.head, config.half)
        gather_rows(ctx.keys.k, rope.slice(block * 8, 8, 0), page, rest, item.part.head, config.dim_v)
        gl.barrier()  # else the compiler reads the pages of all blocks at once, and runs out of registers
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()


@gluon.jit
def gather_rows(source, tile, page, row, head, column: gl.constexpr):
    """Copies rows of pages, from `column` on, into a tile [8, cols]."""
    rows = matrix(source)
    col = column + gl.arange(0, tile.shape[1], gl.SliceLayout(0, EIGHT_ROWS))[None, :]
    async_copy.async_load(tile, rows.rows(page, row, head)[:, None] + col)
