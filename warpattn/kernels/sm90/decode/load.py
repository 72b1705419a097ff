"""Producer warp of the Hopper decode kernel: streams the keys and values of a CTA's share through their rings.

A tile of a paged cache is made of boxes, rows of one page each. The table is read one tile ahead, so that its latency
passes while the warp waits for a free slot. Entries past the end of a sequence are not read (the last page is loaded
again instead, and hidden), and page numbers are clamped to the cache. Pages that no box of 8 rows divides are gathered
row by row with ordinary asynchronous copies, one tile at a time: right, not fast.
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
from .context import Matrix, item_at

# Keys and values that are read once leave L2 before what the next launch needs: code, queries, tables.
STREAMED = gl.constexpr(CachePolicy(l2=FractionalEvictionPolicy("evict_first", 1.0)))


@gluon.jit
def decode_load_role(ctx):
    """Load every tile of this CTA's run, in order."""
    config: gl.constexpr = ctx.config
    k_state = producer_state(config.stages)
    v_state = producer_state(config.stages)
    place = ctx.start
    while place.unit < ctx.end:
        item = item_at(ctx, place)
        leaves = leaves_at(ctx, place, item)
        if config.gathers:
            for i in range(item.begin, item.end):
                k_state = gather_rows(ctx, ctx.keys.k, ctx.rings.k, k_state, item, i, config.dim_qk)
                v_state = gather_rows(ctx, ctx.keys.v, ctx.rings.v, v_state, item, i, config.dim_v)
                hand_over(config, i, leaves)
        else:
            boxes = find_boxes(ctx, item, item.begin)
            for i in range(item.begin, item.end):
                wait_for_new_tokens(ctx, item, i)
                following = find_boxes(ctx, item, gl.minimum(i + 1, item.end - 1))
                k_state = load_boxes(ctx, ctx.keys.k[0], ctx.rings.k, k_state, item, boxes, config.k_bytes)
                v_state = load_boxes(ctx, ctx.keys.v[0], ctx.rings.v, v_state, item, boxes, config.v_bytes)
                boxes = following
                hand_over(config, i, leaves)
        place = place.advance(item.part.count, item.room * ctx.work.heads)


@gluon.jit
def wait_for_new_tokens(ctx, item, i):
    """With a settled cache: wait for the launch in front before key tile number `i` if it has keys of new tokens."""
    config: gl.constexpr = ctx.config
    if config.settled:
        if (item.key_tile(i) + 1) * config.block_n > item.entry.length - ctx.work.tokens:
            gdc_wait()


@gluon.jit
def leaves_at(ctx, place, item):
    """The tile of an item behind which CTAs of the next launch may come: one part of the run in `part_left` is left
    then, and the ring has been filled if that has to be waited for. -1 if the item is not the run's last, or the run
    too long for that."""
    config: gl.constexpr = ctx.config
    run = ctx.end - ctx.start.unit
    last = (place.unit + item.part.count >= ctx.end) & (run <= config.hands_over)
    earliest = item.begin
    if config.settled:
        earliest = gl.minimum(item.begin + (config.stages - 1), item.end - 1)
    return gl.where(last, gl.maximum(item.end - 1 - run * config.unit // config.part_left, earliest), -1)


@gluon.jit
def hand_over(config: gl.constexpr, i, leaves):
    """Let CTAs of the next launch come to SMs that have become free, behind tile `i` if that is where this CTA
    `leaves`. They come once every CTA of this launch has let them, and rely on all in front of this one being done."""
    if config.hands_over > 0:
        if i == leaves:
            if config.settled:
                gdc_wait()
            gdc_launch_dependents()


@gluon.jit
def find_boxes(ctx, item, i):
    """(outer coordinate, row) of every box of key tile number `i`, one after the other in a tuple."""
    first = item.key_tile(i) * ctx.config.block_n
    boxes: gl.constexpr = ctx.config.boxes
    places = ()
    for box in gl.static_range(boxes):
        places = places + find_box(ctx, item, first + box * ctx.config.box)
    return places


@gluon.jit
def find_box(ctx, item, key):
    """(outer coordinate, row) of the box that begins with a key of the item's sequence, or with each of a block."""
    config: gl.constexpr = ctx.config
    if config.page_box == 0:
        return (item.entry.b + key * 0, key)
    else:
        last = gl.maximum(item.entry.length - 1, 0) // config.box * config.box
        return page_of(ctx, item, gl.minimum(key, last))


@gluon.jit
def page_of(ctx, item, key):
    """(page as the table has it, row in it) of a key of the item's sequence, or of a block of keys."""
    page = key // ctx.work.page_size
    at = gl.to_tensor(item.entry.b).to(gl.int64) * ctx.keys.table_stride + page
    number = gl.load(ctx.keys.table + at, mask=(key < item.entry.length), other=0, volatile=ctx.keys.guessed)
    return (number, key - page * ctx.work.page_size)


@gluon.jit
def in_cache(ctx, page):
    """A page number within the cache. Only where it is used: whoever touches what was read waits for it."""
    if ctx.config.page_box == 0:
        return page
    else:
        return gl.maximum(gl.minimum(page, ctx.work.pages - 1), 0)


@gluon.jit
def load_boxes(ctx, desc, ring, state, item, boxes, nbytes: gl.constexpr):
    """One K or V tile into the next slot of its ring."""
    config: gl.constexpr = ctx.config
    keep_pace(config, ring, state)
    full = ring.producer_acquire(state)
    mbarrier.expect(full, nbytes)
    tile = ring.tile(state)
    policy: gl.constexpr = STREAMED if config.one_tile else None
    count: gl.constexpr = config.boxes
    if count == 1:
        tma.async_load(desc, [in_cache(ctx, boxes[0]), boxes[1], item.part.head, 0], full, tile, cache_policy=policy)
    else:
        for box in gl.static_range(count):
            coord = [in_cache(ctx, boxes[2 * box]), boxes[2 * box + 1], item.part.head, 0]
            rows = tile.slice(box * config.box, config.box, 1)
            tma.async_load(desc, coord, full, rows, cache_policy=policy)
    return state.step()


@gluon.jit
def keep_pace(config: gl.constexpr, ring, state):
    """Wait until the tile `under_way` in front of a slot's next one has arrived. The first ones have none in front of
    them: a fresh barrier's wait for its odd phase falls through."""
    most: gl.constexpr = config.under_way
    if most > 0:
        wraps = state.index < most
        index = gl.where(wraps, state.index + (config.stages - most), state.index - most)
        mbarrier.wait(ring.full(index), gl.where(wraps, state.phase, state.phase ^ 1))


@gluon.jit
def gather_rows(ctx, source, ring, state, item, i, cols: gl.constexpr):
    """Key tile number `i` into the next slot of a ring, 16 rows at a time; rows past the end repeat the last one."""
    config: gl.constexpr = ctx.config
    matrix = Matrix(source[0], source[1], source[2], source[3])
    full = ring.producer_acquire(state)
    padded: gl.constexpr = ring.smem.shape[4]
    blocks: gl.constexpr = config.block_n // 16
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // padded, padded // 8], [1, 1], [1, 0])
    col = gl.arange(0, padded, gl.SliceLayout(0, layout))[None, :]
    tile = ring.tile(state).reshape([config.block_n, padded])
    first = item.key_tile(i) * config.block_n
    for block in gl.static_range(blocks):
        row = first + block * 16 + gl.arange(0, 16, gl.SliceLayout(1, layout))
        page, rest = page_of(ctx, item, gl.maximum(gl.minimum(row, item.entry.length - 1), 0))
        pointers = matrix.rows(in_cache(ctx, page), rest, item.part.head)[:, None] + col
        async_copy.async_load(tile.slice(block * 16, 16, 0), pointers, mask=col < cols)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    mbarrier.arrive(full, count=1)
    return state.step()
