"""The producer warp of Hopper's decode kernel: loads the K and V tiles of a CTA's range into their rings.

Scales of tokens are loaded with the K tile by 4-byte cp.async, which the K slot's full barrier counts, too. A tile of a
paged cache consists of TMA boxes, each with rows of one page. The warp reads the page numbers of the next tile before
it waits for a slot, which hides their latency. It never reads table entries past the end of a sequence (it loads the
last page again, and the mask hides it), and clamps page numbers to the cache. Pages that no box of 8 rows divides are
gathered row by row with cp.async, one tile at a time, which is slow.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    CachePolicy,
    FractionalEvictionPolicy,
    fence_async_shared,
    mbarrier,
    tma,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...nvidia.pipelines import producer_state
from ...pieces.scales import has_token_scale, scale_row
from .context import matrix
from .schedule import item_at, next_item

# L2 evicts K and V that only one CTA reads before code, queries and tables, which the next launch reads again.
STREAMED = gl.constexpr(CachePolicy(l2=FractionalEvictionPolicy("evict_first", 1.0)))


@gluon.jit
def load_role(ctx):
    """Loads every tile of this CTA's range, in order."""
    config: gl.constexpr = ctx.config
    k_state = producer_state(config.stages)
    v_state = producer_state(config.stages)
    cursor = ctx.start
    while cursor.unit < ctx.end:
        item = item_at(ctx, cursor)
        trigger = trigger_tile(ctx, cursor, item)
        if config.gathers:
            for i in range(item.begin, item.end):
                k_state = gather_rows(ctx, ctx.keys.k, ctx.rings.k, k_state, item, i, config.dim_qk)
                v_state = gather_rows(ctx, ctx.keys.v, ctx.rings.v, v_state, item, i, config.dim_v)
                trigger_dependents(config, i, trigger)
        else:
            boxes = find_boxes(ctx, item, item.begin)
            pages = scale_pages(ctx, item, item.begin)
            for i in range(item.begin, item.end):
                wait_before_new_tokens(ctx, item, i)
                later = gl.minimum(i + 1, item.end - 1)
                following = find_boxes(ctx, item, later)
                later_pages = scale_pages(ctx, item, later)
                copy_scales(ctx, k_state, item, i, pages)
                k_state = load_boxes(ctx, ctx.keys.k.desc, ctx.rings.k, k_state, item, boxes, config.k_bytes)
                v_state = load_boxes(ctx, ctx.keys.v.desc, ctx.rings.v, v_state, item, boxes, config.v_bytes)
                boxes = following
                pages = later_pages
                trigger_dependents(config, i, trigger)
        cursor = next_item(cursor, item, ctx.work.heads)


@gluon.jit
def wait_before_new_tokens(ctx, item, i):
    """If older keys are ready before the dependency, waits for the preceding kernel before the first key tile (number
    `i`) that holds keys of new tokens."""
    config: gl.constexpr = ctx.config
    if config.overlap.kv_ready_before_dependency:
        if (item.key_tile(i) + 1) * config.block_n > item.row_tile.length - item.row_tile.tokens:
            gdc_wait()


@gluon.jit
def trigger_tile(ctx, cursor, item):
    """Tile after which this CTA triggers the dependent launch (1 / trigger_fraction of its range remains); -1: never,
    because the item is not the range's last, or the range is too long."""
    config: gl.constexpr = ctx.config
    overlap: gl.constexpr = config.overlap
    units = ctx.end - ctx.start.unit
    last = (cursor.unit + item.part.count >= ctx.end) & (units <= overlap.trigger_max_units)
    earliest = item.begin
    if overlap.kv_ready_before_dependency:  # the CTA must wait before it triggers, so it fills the ring first
        earliest = gl.minimum(item.begin + (config.stages - 1), item.end - 1)
    left = units * config.schedule.unit // overlap.trigger_fraction
    return gl.where(last, gl.maximum(item.end - 1 - left, earliest), -1)


@gluon.jit
def trigger_dependents(config: gl.constexpr, i, trigger):
    """Triggers the dependent launch after tile `i` if that is tile `trigger`. That launch relies on the end of all
    kernels before this one, so a CTA that may not have waited for them yet waits here."""
    if config.overlap.trigger_max_units > 0:
        if i == trigger:
            if config.overlap.kv_ready_before_dependency:
                gdc_wait()
            gdc_launch_dependents()


@gluon.aggregate
class Box:
    """Where the keys of a box begin: batch entry or page, and row."""

    outer: gl.tensor
    row: gl.tensor


@gluon.jit
def find_boxes(ctx, item, i):
    """The `Box` of every box of key tile number `i`."""
    first = item.key_tile(i) * ctx.config.block_n
    boxes: gl.constexpr = ctx.config.boxes
    found = ()
    for box in gl.static_range(boxes):
        found += (find_box(ctx, item, first + box * ctx.config.box),)
    return found


@gluon.jit
def find_box(ctx, item, key):
    """The `Box` that begins with `key` of the item's sequence, any shape."""
    config: gl.constexpr = ctx.config
    if config.page_box is None:
        return Box(item.row_tile.b + key * 0, key)
    else:
        last = gl.maximum(item.row_tile.length - 1, 0) // config.box * config.box
        page, row = page_of(ctx, item, gl.minimum(key, last))
        return Box(page, row)


@gluon.jit
def page_of(ctx, item, key):
    """(page number from the block table, row in the page) of `key` of the item's sequence, any shape."""
    page = key // ctx.work.page_size
    at = gl.to_tensor(item.row_tile.b).to(gl.int64) * ctx.keys.table_stride + page
    number = gl.load(ctx.keys.table + at, mask=(key < item.row_tile.length), other=0, volatile=ctx.keys.speculative)
    return (number, key - page * ctx.work.page_size)


@gluon.jit
def in_cache(ctx, page):
    """Clamps a page number to the cache. Called only where the number is used, because the warp waits for it here."""
    if ctx.config.page_box is None:
        return page
    else:
        return gl.maximum(gl.minimum(page, ctx.work.pages - 1), 0)


@gluon.jit
def load_boxes(ctx, desc, ring, state, item, boxes, nbytes: gl.constexpr, column: gl.constexpr = 0):
    """Loads one K or V tile, from `column` on, into the next slot of its ring."""
    throttle(ctx.config, ring, state)
    full = ring.producer_acquire(state)
    copy_boxes(ctx, desc, ring.tile(state), full, item, boxes, nbytes, column)
    return state.step()


@gluon.jit
def copy_boxes(ctx, desc, tile, full, item, boxes, nbytes: gl.constexpr, column: gl.constexpr):
    """Loads a tile, from `column` on, into shared memory; `full` completes when its bytes have arrived."""
    config: gl.constexpr = ctx.config
    mbarrier.expect(full, nbytes)
    policy: gl.constexpr = STREAMED if config.schedule.one_row_tile else None
    count: gl.constexpr = config.boxes
    if count == 1:
        coord = [in_cache(ctx, boxes[0].outer), boxes[0].row, item.part.head, column]
        tma.async_load(desc, coord, full, tile, cache_policy=policy)
    else:
        for box in gl.static_range(count):
            coord = [in_cache(ctx, boxes[box].outer), boxes[box].row, item.part.head, column]
            rows = tile.slice(box * config.box, config.box, 1)
            tma.async_load(desc, coord, full, rows, cache_policy=policy)


@gluon.jit
def scale_pages(ctx, item, i):
    """Page numbers of the keys of tile number `i`, 32 at a time, where tokens have scales. A page number takes as long
    to load as the scale that it locates, so it is read one tile earlier."""
    config: gl.constexpr = ctx.config
    pages = ()
    if config.scale_bytes > 0:
        for block in gl.static_range(config.block_n // 32):
            page, _row = scale_place(ctx, item, block_keys(ctx, item, i, block))
            pages += (page,)
    return pages


@gluon.jit
def block_keys(ctx, item, i, block: gl.constexpr):
    """Keys [32] of a block of tile number `i`."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    return item.key_tile(i) * ctx.config.block_n + block * 32 + gl.arange(0, 32, layout)


@gluon.jit
def scale_place(ctx, item, key):
    """(batch entry or page, row) of the scale of each `key`."""
    if ctx.config.page_box is None:
        return item.row_tile.b + key * 0, key
    else:
        return page_of(ctx, item, key)


@gluon.jit
def copy_scales(ctx, state, item, i, pages):
    """Waits for a K slot and starts copying the scales of tile number `i`'s keys and values beside it; the slot's full
    barrier waits for them. Scales past the last key are 0."""
    config: gl.constexpr = ctx.config
    if config.scale_bytes > 0:
        throttle(config, ctx.rings.k, state)
        full = ctx.rings.k.producer_acquire(state)
        for block in gl.static_range(config.block_n // 32):
            key = block_keys(ctx, item, i, block)
            row = key if config.page_box is None else key % ctx.work.page_size
            place = ScalePlace(in_cache(ctx, pages[block]), row, item.part.head, key < item.row_tile.length)
            if has_token_scale(config, "k"):
                copy_block(ctx.rings.scales.k.index(state.index), block, ctx.keys.k, place, "k", config)
            if has_token_scale(config, "v"):
                copy_block(ctx.rings.scales.v.index(state.index), block, ctx.keys.v, place, "v", config)
        async_copy.mbarrier_arrive(full)


@gluon.aggregate
class ScalePlace:
    """Where the scales of 32 keys of a head are: batch entry or page, row and head; `there`: whether the key exists."""

    outer: gl.tensor
    row: gl.tensor
    head: gl.tensor
    there: gl.tensor


@gluon.jit
def copy_block(slot, block: gl.constexpr, rows, place, operand: gl.constexpr, config: gl.constexpr):
    """Copies the scales of a block of 32 keys into a slot [N], or [N] for each block of columns; 0 for blocks
    of columns past the head dim."""
    at = place.outer.to(gl.int64) * rows.outer + scale_row(config, operand, place.row).to(gl.int64) * rows.row
    source = rows.scale + at + place.head * rows.head
    blocks: gl.constexpr = config.scale_blocks(operand)
    if blocks == 1:
        async_copy.async_load(slot.slice(block * 32, 32, 0), source, mask=place.there)
    else:
        for part in gl.static_range(blocks):
            into = slot.slice(part * config.block_n + block * 32, 32, 0)
            inside = place.there & (part < given_blocks(config, operand))
            async_copy.async_load(into, source + part * rows.block, mask=inside)


@gluon.constexpr_function
def given_blocks(config, operand):
    """Number of blocks of columns of the head dim, without the tile's padding."""
    return (config.dim_qk if operand == "k" else config.dim_v) // config.eight_bit.columns(operand)


@gluon.jit
def throttle(config: gl.constexpr, ring, state):
    """Waits until the tile `max_inflight_stages` before this one has arrived. For the first tiles the wait falls
    through, as a wait for the odd phase of a fresh barrier does."""
    most: gl.constexpr = config.overlap.max_inflight_stages
    if most is not None:
        wraps = state.index < most
        index = gl.where(wraps, state.index + (config.stages - most), state.index - most)
        mbarrier.wait(ring.full(index), gl.where(wraps, state.phase, state.phase ^ 1))


@gluon.jit
def gather_rows(ctx, source, ring, state, item, i, cols: gl.constexpr):
    """Copies key tile number `i` into the next slot of a ring, 16 rows at a time; rows past the end repeat the last."""
    config: gl.constexpr = ctx.config
    rows = matrix(source)
    full = ring.producer_acquire(state)
    padded: gl.constexpr = ring.smem.shape[4]
    blocks: gl.constexpr = config.block_n // 16
    lanes: gl.constexpr = min(padded // 8, 32)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [1, 1], [1, 0])
    col = gl.arange(0, padded, gl.SliceLayout(0, layout))[None, :]
    tile = ring.tile(state).reshape([config.block_n, padded])
    first = item.key_tile(i) * config.block_n
    for block in gl.static_range(blocks):
        row = first + block * 16 + gl.arange(0, 16, gl.SliceLayout(1, layout))
        page, rest = page_of(ctx, item, gl.maximum(gl.minimum(row, item.row_tile.length - 1), 0))
        pointers = rows.rows(in_cache(ctx, page), rest, item.part.head)[:, None] + col
        async_copy.async_load(tile.slice(block * 16, 16, 0), pointers, mask=col < cols)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    mbarrier.arrive(full, count=1)
    return state.step()
