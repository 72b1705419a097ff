"""The loading role for 8-bit latents without swap-AB: loads them and converts them to the consumers' 16-bit tiles.

      left, right   DRAM ── TMA ──▶ [ 8 bits | free ] ── LDS ──▶ × scale, round ── STS ──▶ [ 16 bits ]   the same slot
      rotary part   DRAM ── TMA ─────────────────────────────────────────────────────────▶ [ 16 bits ]

The role is a warpgroup instead of a producer warp. Half a tile arrives in the first half of the slot that it is
converted in; all of it is in registers, 32 a thread, before the first 16-bit element is written. So shared memory has
nothing but slots of 16 bits, as many as without conversion: one tile is multiplied while the next one arrives and is
converted. A half is full when the warpgroup has written it; a rotary part of 16 bits, when it has arrived. 8-bit rotary
parts take the latents' path. Scales, one or four a token, are loaded into registers while their tile arrives, page
numbers one tile earlier.

Rows past the end of a sequence become 0 in registers, because a weight of 0 times NaN is NaN.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...nvidia.pipelines import producer_state
from ..decode.load import copy_boxes, find_boxes, in_cache
from ..decode.schedule import item_at, next_item
from .context import arrived, arriving, tile_slots
from .load import load_rope

COLUMNS = gl.constexpr(128)  # columns that share a scale


@gluon.constexpr_function
def word_layout(columns, run):
    """Registers of a part of a tile [64, columns] of words, `run` consecutive ones a thread: 4 of 8-bit elements as
    they are loaded, 8 of 16-bit ones as they are stored. A thread has two rows. Four lanes have 64 bytes of a row of 8
    bits, and eight lanes rows whose swizzles put both their loads and their 16-byte stores in different banks."""
    own = [[0, 1 << i] for i in range(run.bit_length() - 1)]
    pieces = [[0, step] for step in (4 * run, 8 * run) if step < columns]
    lanes = [[0, run], [0, 2 * run], [5, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([*own, *pieces, [32, 0]], lanes, [[8, 0], [16, 0]], [], [64, columns])


@gluon.jit
def load_latents(ctx):
    """Loads and converts every tile of this CTA's range, in order."""
    config: gl.constexpr = ctx.config
    slots = tile_slots(config, producer_state)
    cursor = ctx.start
    while cursor.unit < ctx.end:
        item = item_at(ctx, cursor)
        boxes = find_boxes(ctx, item, item.begin)
        for i in range(item.begin, item.end):
            following = find_boxes(ctx, item, gl.minimum(i + 1, item.end - 1))
            copy_tile(ctx, slots, item, boxes)
            scales = load_scales(ctx, item, i, boxes)
            convert_tile(ctx, slots, scales, item.row_tile.length - item.key_tile(i) * config.block_n)
            slots = slots.step()
            boxes = following
        cursor = next_item(cursor, item, ctx.work.heads)


@gluon.jit
def copy_tile(ctx, slots, item, boxes):
    """Starts loading a tile into its slots."""
    config: gl.constexpr = ctx.config
    copy_part(ctx, ctx.rings.v, slots.left, ctx.keys.v.desc, item, boxes, 0)
    copy_part(ctx, ctx.rings.v, slots.right, ctx.keys.v.desc, item, boxes, config.half)
    if config.narrow_rope:
        copy_part(ctx, ctx.rings.k, slots.rope, ctx.keys.k.desc, item, boxes, 0)
    else:
        load_rope(ctx, slots.rope, item, boxes)


@gluon.jit
def copy_part(ctx, ring, slot, desc, item, boxes, column: gl.constexpr):
    """Starts loading an 8-bit part of a tile, from `column` on, into the first half of its slot."""
    ring.producer_acquire(slot)
    tile = arriving(ctx, ring, slot)
    nbytes: gl.constexpr = tile.shape[1] * tile.shape[3]
    copy_boxes(ctx, desc, tile, arrived(ring, slot), item, boxes, nbytes, column)


@gluon.jit
def load_scales(ctx, item, i, boxes):
    """Loads the scales [N] of each block of columns of tile number `i`; 0 past the end of the sequence."""
    config: gl.constexpr = ctx.config
    rows: gl.constexpr = gl.SliceLayout(1, word_layout(config.half // 4, 4))
    key = gl.arange(0, config.block_n, rows)
    page, row = find_rows(ctx, boxes, key)
    there = item.key_tile(i) * config.block_n + key < item.row_tile.length
    source = ctx.keys.v
    first = source.scale + (page * source.outer + row * source.row + item.part.head * source.head)
    scales = ()
    blocks: gl.constexpr = config.dim_v // COLUMNS
    for block in gl.static_range(blocks):
        scales += (gl.load(first + block * source.block, mask=there, other=0.0),)
    return scales


@gluon.jit
def find_rows(ctx, boxes, key):
    """(pages, rows in them) of keys of the tile with these `boxes`."""
    config: gl.constexpr = ctx.config
    page = in_cache(ctx, boxes[0].outer) + key * 0
    row = boxes[0].row + key
    count: gl.constexpr = config.boxes
    for box in gl.static_range(1, count):
        here = key >= box * config.box
        page = gl.where(here, in_cache(ctx, boxes[box].outer), page)
        row = gl.where(here, boxes[box].row + key - box * config.box, row)
    return page.to(gl.int64), row.to(gl.int64)


@gluon.jit
def convert_tile(ctx, slots, scales, valid):
    """Converts a tile in its slots, rows from `valid` on to 0; its rotary part, too, if that has 8 bits."""
    convert_part(ctx, ctx.rings.v, slots.left, scales[0], scales[1], valid)
    convert_part(ctx, ctx.rings.v, slots.right, scales[2], scales[3], valid)
    if ctx.config.narrow_rope:
        convert_part(ctx, ctx.rings.k, slots.rope, scales[0], scales[0], valid)


@gluon.jit
def convert_part(ctx, ring, slot, first, second, valid):
    """Waits for an 8-bit part of a tile, multiplies it by the scales [N] of its first and second block of columns and
    writes it to its slot."""
    mbarrier.wait(arrived(ring, slot), slot.phase ^ 1)
    narrow = words(arriving(ctx, ring, slot))
    layout: gl.constexpr = word_layout(narrow.shape[1], 4)
    x = narrow.load(layout)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    if valid < ctx.config.block_n:
        x = gl.where(gl.arange(0, x.shape[0], rows)[:, None] < valid, x, 0)
    first = gl.convert_layout(first, rows, assert_trivial=True)[:, None]
    second = gl.convert_layout(second, rows, assert_trivial=True)[:, None]
    block = gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))[None, :] // (COLUMNS // 4)
    low, high = gl.inline_asm_elementwise(
        convert_asm(ctx.config.latents.name), "=r,=r,r,r", [x, gl.where(block == 0, first, second)],
        (gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    pairs = gl.join(low, high).reshape([x.shape[0], 2 * x.shape[1]])
    words(ring.tile(slot)).store(gl.convert_layout(pairs, word_layout(pairs.shape[1], 8), assert_trivial=True))
    fence_async_shared()
    ring.producer_commit(slot)


@gluon.constexpr_function
def convert_asm(element):
    """PTX that makes two registers of bf16 from one with four 8-bit elements, times a scale in fp32. Of elements one by
    one the compiler would make as many permutations of bytes as conversions."""
    kind = {"fp8e4nv": "e4m3x2", "fp8e5": "e5m2x2"}[element]
    return (
        "{ .reg .b16 low, high, a, b, c, d; .reg .b32 x, y; .reg .f32 p, q, r, s; mov.b32 {low, high}, $2;"
        f" cvt.rn.f16x2.{kind} x, low; cvt.rn.f16x2.{kind} y, high; mov.b32 {{a, b}}, x; mov.b32 {{c, d}}, y;"
        " cvt.f32.f16 p, a; cvt.f32.f16 q, b; cvt.f32.f16 r, c; cvt.f32.f16 s, d;"
        " mul.f32 p, p, $3; mul.f32 q, q, $3; mul.f32 r, r, $3; mul.f32 s, s, $3;"
        " cvt.rn.bf16x2.f32 $0, q, p; cvt.rn.bf16x2.f32 $1, s, r; }"
    )


@gluon.jit
def words(tile):
    """A part [1, N, 1, columns] of a tile, viewed as 32-bit words [N, words]."""
    shape: gl.constexpr = [tile.shape[1], tile.shape[3] * tile.dtype.primitive_bitwidth // 32]
    return tile.reinterpret(gl.int32, shape, gl.NVMMASharedLayout.get_default_for(shape, gl.int32))
