"""The loading role for 8-bit latents without swap-AB: loads them and converts them to the consumers' 16-bit tiles.

      DRAM ── TMA ──▶ two tiles of 8 bits ── LDS ──▶ registers ── × scale, round ──▶ latents of a slot, 16 bits
      DRAM ── TMA ─────────────────────────────────────────────────────────────────▶ rotary part of the slot

The role is a warpgroup instead of a producer warp; a tile is 128 elements a thread. Once all of a tile is in registers,
the copy of the tile after the next starts into its place, so two copies are in flight while a third tile is converted.
A slot is full when its rotary part has arrived and the warpgroup has written its latents. 8-bit rotary parts are
converted like latents. Scales, one or four a token, are loaded into registers one tile ahead, page numbers two.

Rows past the end of a sequence are zeroed in the 8-bit tile, because a weight of 0 times NaN is NaN.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ...nvidia.pipelines import producer_state
from ..decode.load import STREAMED, find_boxes, in_cache
from ..decode.schedule import item_at, next_item
from ..layouts import element_type
from .context import half_tile, rope_tile, tile_slots
from .load import load_rope

COLUMNS = gl.constexpr(128)  # columns that share a scale
# A lane has pieces of 16 bytes of 8-bit elements, and four lanes 64 bytes of a row. Rows of eight lanes are chosen such
# that their swizzles put them in different banks, both for 8-bit loads and for 16-byte stores of 16-bit elements.
_PIECES = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 64], [0, 128]]
_LANES = [[0, 16], [0, 32], [5, 0], [2, 0], [4, 0]]
_WARPS = [[8, 0], [16, 0]]
STORED = gl.constexpr(gl.DistributedLinearLayout(_PIECES, _LANES, _WARPS, [], [32, 256]))
ROTARY = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0]))  # the layout of rotary parts
SCALED = gl.constexpr(  # `STORED` with the columns as (block of a scale, column in the block)
    gl.DistributedLinearLayout(
        *([[row, column // 128, column % 128] for row, column in bases] for bases in (_PIECES, _LANES, _WARPS)),
        [], [32, 2, 128],
    )
)  # fmt: skip


@gluon.jit
def load_latents(ctx):
    """Loads and converts every tile of this CTA's range, in order."""
    config: gl.constexpr = ctx.config
    slots = tile_slots(config, producer_state)
    number = gl.to_tensor(0)  # tiles that this CTA has converted
    cursor = ctx.start
    while cursor.unit < ctx.end:
        item = item_at(ctx, cursor)
        last = gl.maximum(item.end - 1, item.begin)
        boxes = find_boxes(ctx, item, item.begin)
        following = find_boxes(ctx, item, gl.minimum(item.begin + 1, last))
        copy_latents(ctx, item, boxes, number, item.begin < item.end)
        copy_latents(ctx, item, following, number + 1, item.begin + 1 < item.end)
        later = find_boxes(ctx, item, gl.minimum(item.begin + 2, last))
        scales = load_scales(ctx, item, item.begin, boxes)
        for i in range(item.begin, item.end):
            next_scales = load_scales(ctx, item, gl.minimum(i + 1, last), following)
            taken = take_latents(ctx, number, item.row_tile.length - item.key_tile(i) * config.block_n)
            copy_latents(ctx, item, later, number, i + 2 < item.end)
            slots = fill_slots(ctx, slots, item, boxes, taken, scales)
            number += 1
            scales = next_scales
            boxes = following
            following = later
            later = find_boxes(ctx, item, gl.minimum(i + 3, last))
        cursor = next_item(cursor, item, ctx.work.heads)


@gluon.jit
def copy_latents(ctx, item, boxes, number, there):
    """If tile `number` of this CTA is `there`, starts loading it into its 8-bit tile."""
    config: gl.constexpr = ctx.config
    policy: gl.constexpr = STREAMED if config.schedule.one_row_tile else None
    tiles = ctx.rings.latents
    slots: gl.constexpr = tiles.landed.shape[0]
    landed = tiles.landed.index(number % slots)
    mbarrier.expect(landed, config.staged_bytes, pred=there)
    count: gl.constexpr = config.boxes
    for box in gl.static_range(count):
        for part in gl.static_range(2):
            to = box_of(tiles.block(number % slots, part), box, config)
            at = [in_cache(ctx, boxes[2 * box]), boxes[2 * box + 1], item.part.head, part * config.half]
            tma.async_load(ctx.keys.v.desc, at, landed, to, pred=there, cache_policy=policy)
        if config.narrow_rope:
            to = box_of(tiles.rope.index(number % slots), box, config)
            at = [in_cache(ctx, boxes[2 * box]), boxes[2 * box + 1], item.part.head, 0]
            tma.async_load(ctx.keys.k.desc, at, landed, to, pred=there, cache_policy=policy)


@gluon.jit
def box_of(tile, box: gl.constexpr, config: gl.constexpr):
    """The rows of a tile [1, N, 1, cols] that one TMA box fills."""
    if config.boxes == 1:
        return tile
    else:
        return tile.slice(box * config.box, config.box, 1)


@gluon.jit
def take_latents(ctx, number, valid):
    """Waits for tile `number` of this CTA and loads it to registers: both blocks of latents, rows from `valid` on as 0,
    and an 8-bit rotary part; its place is free then."""
    config: gl.constexpr = ctx.config
    tiles = ctx.rings.latents
    slots: gl.constexpr = tiles.landed.shape[0]
    mbarrier.wait(tiles.landed.index(number % slots), (number // slots) & 1)
    left = tiles.block(number % slots, 0).reshape([config.block_n, config.half])
    right = tiles.block(number % slots, 1).reshape([config.block_n, config.half])
    if valid < config.block_n:
        clear_rows(left, valid)
        clear_rows(right, valid)
        fence_async_shared()  # before the copy that follows
    taken = left.load(STORED), right.load(STORED)
    if config.narrow_rope:
        rope = tiles.rope.index(number % slots).reshape([config.block_n, config.rope])
        taken = taken[0], taken[1], rope.load(ROTARY)
    gl.barrier()
    return taken


@gluon.jit
def clear_rows(tile, valid):
    """Zeroes the rows of a tile from `valid` on, in the layout in which threads load them afterwards."""
    row = gl.arange(0, tile.shape[0], gl.SliceLayout(1, STORED))[:, None]
    found = tile.load(STORED).to(gl.int8, bitcast=True)
    tile.store(gl.where(row < valid, found, gl.zeros_like(found)).to(tile.dtype, bitcast=True))


@gluon.jit
def load_scales(ctx, item, i, boxes):
    """Loads the scales [N, 2] of each half of tile number `i`, and [N] of an 8-bit rotary part; 0 past the end of the
    sequence."""
    config: gl.constexpr = ctx.config
    source = ctx.keys.v
    at, there = scale_rows(ctx, item, i, boxes, gl.SliceLayout(1, gl.SliceLayout(2, SCALED)))
    block = gl.arange(0, config.half // COLUMNS, gl.SliceLayout(0, gl.SliceLayout(2, SCALED)))
    blocks: gl.constexpr = config.half // COLUMNS
    left = source.scale + at[:, None] + (block * source.block)[None, :]
    first = gl.load(left, mask=there[:, None] & (block >= 0)[None, :], other=0.0)
    second = gl.load(left + blocks * source.block, mask=there[:, None] & (block >= 0)[None, :], other=0.0)
    if config.narrow_rope:
        at, there = scale_rows(ctx, item, i, boxes, gl.SliceLayout(1, ROTARY))
        return first, second, gl.load(source.scale + at, mask=there, other=0.0)
    else:
        return first, second


@gluon.jit
def scale_rows(ctx, item, i, boxes, layout: gl.constexpr):
    """(offsets of the scales of tile number `i`'s keys, in elements; whether the keys exist), both [N]."""
    config: gl.constexpr = ctx.config
    source = ctx.keys.v
    row = gl.arange(0, config.block_n, layout)
    page = row * 0
    place = row * 0
    count: gl.constexpr = config.boxes
    for box in gl.static_range(count):
        here = row // config.box == box
        page = gl.where(here, in_cache(ctx, boxes[2 * box]), page)
        place = gl.where(here, boxes[2 * box + 1] + row - box * config.box, place)
    there = item.key_tile(i) * config.block_n + row < item.row_tile.length
    at = page.to(gl.int64) * source.outer + place.to(gl.int64) * source.row + item.part.head * source.head
    return at, there


@gluon.jit
def fill_slots(ctx, slots, item, boxes, latents, scales):
    """Fills a tile's slots: converts its latents, and loads its rotary part by TMA or converts it, too."""
    config: gl.constexpr = ctx.config
    if not config.narrow_rope:
        load_rope(ctx, slots.rope, item, boxes)
    fill_half(ctx, slots.left, latents[0], scales[0])
    fill_half(ctx, slots.right, latents[1], scales[1])
    if config.narrow_rope:
        full = ctx.rings.k.producer_acquire(slots.rope)
        dtype: gl.constexpr = element_type(config.element)
        rope_tile(ctx, slots.rope).store((latents[2].to(gl.float32) * scales[2][:, None]).to(dtype))
        fence_async_shared()
        mbarrier.arrive(full, count=1)
    return slots.step()


@gluon.jit
def fill_half(ctx, slot, latents, scales):
    """Converts half of a tile's latents and writes it to a slot."""
    full = ctx.rings.v.producer_acquire(slot)
    half_tile(ctx, slot).store(converted(latents, scales, ctx.config))
    fence_async_shared()
    mbarrier.arrive(full, count=1)


@gluon.jit
def converted(x, scale, config: gl.constexpr):
    """Multiplies half a tile [N, 256] by its scales [N, 2] and rounds once."""
    dtype: gl.constexpr = element_type(config.element)
    blocks: gl.constexpr = config.half // COLUMNS
    wide = gl.convert_layout(x.reshape([config.block_n, blocks, COLUMNS]), SCALED, assert_trivial=True)
    made = (wide.to(gl.float32) * scale[:, :, None]).to(dtype).reshape([config.block_n, config.half])
    return gl.convert_layout(made, STORED, assert_trivial=True)
