"""Producer warp of the Hopper decode kernel: streams the keys and values of a CTA's share through their rings.

A tile of a paged cache is made of boxes, rows of one page each. The table is read one tile ahead, so that its latency
passes while the warp waits for a free slot. Entries past the end of a sequence are not read (the last page is loaded
again instead, and hidden), and page numbers are clamped to the cache.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ..nvidia.pipelines import producer_state
from .decode_context import item_at


@gluon.jit
def decode_load_role(ctx):
    """Load every tile of this CTA's run, in order."""
    config: gl.constexpr = ctx.config
    k_state = producer_state(config.stages)
    v_state = producer_state(config.stages)
    place = ctx.start
    while place.unit < ctx.end:
        item = item_at(ctx, place)
        boxes = find_boxes(ctx, item, item.begin)
        for i in range(item.begin, item.end):
            following = find_boxes(ctx, item, gl.minimum(i + 1, item.end - 1))
            k_state = load_boxes(ctx, ctx.keys.k, ctx.rings.k, k_state, item, boxes, config.k_bytes)
            v_state = load_boxes(ctx, ctx.keys.v, ctx.rings.v, v_state, item, boxes, config.v_bytes)
            boxes = following
        place = place.advance(item.part.count, item.entry.units * ctx.work.heads)


@gluon.jit
def find_boxes(ctx, item, i):
    """(outer coordinate, row) of every box of key tile number `i`, one after the other in a tuple."""
    config: gl.constexpr = ctx.config
    first = item.entry.span.key_tile(i) * config.block_n
    if config.page_box == 0:
        return (item.entry.b, first)
    else:
        places = ()
        for box in gl.static_range(config.boxes):
            key = first + box * config.box
            last = gl.maximum(item.entry.length - 1, 0) // config.box * config.box
            key = gl.minimum(key, last)
            page = key // ctx.work.page_size
            at = item.entry.b.to(gl.int64) * ctx.keys.table_stride + page
            number = gl.load(ctx.keys.table + at, mask=item.entry.length > 0, other=0)
            number = gl.maximum(gl.minimum(number, ctx.work.pages - 1), 0)
            places = places + (number, key - page * ctx.work.page_size)
        return places


@gluon.jit
def load_boxes(ctx, desc, ring, state, item, boxes, nbytes: gl.constexpr):
    """One K or V tile into the next slot of its ring."""
    config: gl.constexpr = ctx.config
    full = ring.producer_acquire(state)
    mbarrier.expect(full, nbytes)
    tile = ring.tile(state)
    if config.boxes == 1:
        tma.async_load(desc, [boxes[0], boxes[1], item.part.head, 0], full, tile)
    else:
        for box in gl.static_range(config.boxes):
            coord = [boxes[2 * box], boxes[2 * box + 1], item.part.head, 0]
            tma.async_load(desc, coord, full, tile.slice(box * config.box, config.box, 1))
    return state.step()
