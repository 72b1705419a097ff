"""Producer warp of the Hopper kernel for latent attention: key tiles [N, 512 | 64] into their ring, once for keys and
values. Boxes, pages and clamping are decode's (decode/load.py).

Values past the end of a sequence must be 0, because a hidden key's weight of 0 does not hide a NaN. In decode the
warpgroup clears them in its own V tile; here a tile serves two warpgroups, as keys as well. So the producer clears it
before either reads it: the copies complete a barrier of the producer's own, and `full` gets a plain arrival afterwards.
Such a tile is the first one of its sequence's work item, and the next tile's copies are in flight meanwhile.

      tile 0   load ──▶ landed ─────────────▶ clear rows past the end ─▶ arrive on full(0)
      tile 1            load ──▶ full(1)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ...nvidia.pipelines import producer_state
from ..decode.context import matrix
from ..decode.load import STREAMED, find_boxes, in_cache, page_of
from ..decode.schedule import item_at, next_item

EIGHT_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [1, 1], [1, 0]))  # of the producer, four lanes a row


@gluon.jit
def load_tiles(ctx):
    """Load every tile of this CTA's range, in order."""
    config: gl.constexpr = ctx.config
    state = producer_state(config.stages)
    phase = gl.to_tensor(0)
    cursor = ctx.start
    while cursor.unit < ctx.end:
        item = item_at(ctx, cursor)
        if config.gathers:
            for i in range(item.begin, item.end):
                state = gather_tile(ctx, state, item, i)
        elif config.schedule.has_lengths:
            valid = item.row_tile.length - item.key_tile(item.begin) * config.block_n
            clear = valid < config.block_n
            slot = state.index
            boxes = find_boxes(ctx, item, item.begin)
            for i in range(item.begin, item.end + 1):
                if i < item.end:
                    following = find_boxes(ctx, item, gl.minimum(i + 1, item.end - 1))
                    state = load_tile(ctx, state, item, boxes, clear & (i == item.begin))
                    boxes = following
                if clear & (i == item.begin + 1):
                    finish_cleared(ctx, slot, phase, valid)
            phase = phase ^ clear.to(gl.int32)
        else:
            for i in range(item.begin, item.end):
                state = load_tile(ctx, state, item, find_boxes(ctx, item, i), False)
        cursor = next_item(cursor, item, ctx.work.heads)


@gluon.jit
def load_tile(ctx, state, item, boxes, clear):
    """One key tile into the next slot; if the producer will `clear` rows of it, on its own barrier instead of the
    slot's."""
    config: gl.constexpr = ctx.config
    policy: gl.constexpr = STREAMED if config.schedule.one_row_tile else None
    ring = ctx.rings.keys
    ring.producer_acquire(state)
    full = ring.bars.index(gl.where(clear, 2 * config.stages, state.index))
    mbarrier.expect(full, config.tile_bytes)
    count: gl.constexpr = config.boxes
    for box in gl.static_range(count):
        page = in_cache(ctx, boxes[2 * box])
        row = boxes[2 * box + 1]
        for part in gl.static_range(2):
            to = box_of(ring.tile(state, part), box, config)
            at = [page, row, item.part.head, part * config.half]
            tma.async_load(ctx.keys.v.desc, at, full, to, cache_policy=policy)
        to = box_of(ctx.rings.rope.index(state.index), box, config)
        at = [page, row, item.part.head, config.dim_v]
        tma.async_load(ctx.keys.k.desc, at, full, to, cache_policy=policy)
    return state.step()


@gluon.jit
def finish_cleared(ctx, slot, phase, valid):
    """Wait for a tile on the producer's barrier, clear its latents from row `valid` on, and complete its `full`."""
    config: gl.constexpr = ctx.config
    ring = ctx.rings.keys
    mbarrier.wait(ring.bars.index(2 * config.stages), phase)
    row = gl.arange(0, 8, gl.SliceLayout(1, EIGHT_ROWS))[:, None]
    blocks: gl.constexpr = config.block_n // 8
    for part in gl.static_range(2):
        tile = ring.smem.index(2 * slot + part).reshape([config.block_n, config.half])
        for block in gl.static_range(blocks):
            if block * 8 + 8 > valid:
                rows = tile.slice(block * 8, 8, 0)
                found = rows.load(EIGHT_ROWS)
                rows.store(gl.where(block * 8 + row < valid, found, gl.zeros_like(found)))
    fence_async_shared()
    mbarrier.arrive(ring.full(slot), count=1)


@gluon.jit
def box_of(tile, box: gl.constexpr, config: gl.constexpr):
    """Rows of a tile [1, N, 1, cols] that one copy fills."""
    if config.boxes == 1:
        return tile
    else:
        return tile.slice(box * config.box, config.box, 1)


@gluon.jit
def gather_tile(ctx, state, item, i):
    """Key tile number `i` into the next slot."""
    config: gl.constexpr = ctx.config
    ring = ctx.rings.keys
    full = ring.producer_acquire(state)
    left = ring.tile(state, 0).reshape([config.block_n, config.half])
    right = ring.tile(state, 1).reshape([config.block_n, config.half])
    rope = ctx.rings.rope.index(state.index).reshape([config.block_n, config.rope])
    gather_parts(ctx, item, i, left, right, rope)
    mbarrier.arrive(full, count=1)
    return state.step()


@gluon.jit
def gather_parts(ctx, item, i, left, right, rope):
    """Both halves of the latents of key tile number `i` and their rotary part, 8 rows at a time; rows past the end
    repeat the last one."""
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
    """Rows of pages, from `column` on, into a tile [8, cols]."""
    rows = matrix(source)
    col = column + gl.arange(0, tile.shape[1], gl.SliceLayout(0, EIGHT_ROWS))[None, :]
    async_copy.async_load(tile, rows.rows(page, row, head)[:, None] + col)
