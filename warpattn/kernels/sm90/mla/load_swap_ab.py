"""Producer warp of latent attention with swap-AB: rotary parts and halves of latents, each in a ring of its own. Boxes,
pages, clamping and copies are decode's (decode/load.py); hidden values are taken out where they are multiplied."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...nvidia.pipelines import producer_state
from ..decode.load import find_boxes, load_boxes, scale_pages
from ..decode.schedule import item_at, next_item
from .context import half_tile, rope_tile, tile_slots
from .eight_bit_swap_ab import copy_latent_scales
from .load import gather_parts


@gluon.jit
def load_halves(ctx):
    """Load every tile of this CTA's range, in order."""
    slots = tile_slots(ctx.config, producer_state)
    cursor = ctx.start
    while cursor.unit < ctx.end:
        item = item_at(ctx, cursor)
        slots = load_item(ctx, slots, item)
        cursor = next_item(cursor, item, ctx.work.heads)


@gluon.jit
def load_item(ctx, slots, item):
    """Every tile of an item into the next slots; returns those of the tile after it."""
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
            slots = load_tile(ctx, slots, item, boxes)
            boxes, pages = following, later_pages
    return slots


@gluon.jit
def load_tile(ctx, slots, item, boxes):
    """A key tile, the rotary part first."""
    config: gl.constexpr = ctx.config
    k, v = ctx.keys.k.desc, ctx.keys.v.desc
    load_boxes(ctx, k, ctx.rings.k, slots.rope, item, boxes, config.rope_bytes, config.rope_column)
    load_boxes(ctx, v, ctx.rings.v, slots.left, item, boxes, config.half_bytes)
    load_boxes(ctx, v, ctx.rings.v, slots.right, item, boxes, config.half_bytes, config.half)
    return slots.step()


@gluon.jit
def gather_tile(ctx, slots, item, i):
    """Key tile number `i` of pages that no box divides."""
    rings = ctx.rings
    rope = rings.k.producer_acquire(slots.rope)
    left = rings.v.producer_acquire(slots.left)
    right = rings.v.producer_acquire(slots.right)
    gather_parts(ctx, item, i, half_tile(ctx, slots.left), half_tile(ctx, slots.right), rope_tile(ctx, slots.rope))
    mbarrier.arrive(rope, count=1)
    mbarrier.arrive(left, count=1)
    mbarrier.arrive(right, count=1)
    return slots.step()
