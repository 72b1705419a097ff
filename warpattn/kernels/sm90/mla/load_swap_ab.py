"""Producer warp of latent attention with swap-AB: rotary parts and halves of latents, each in a ring of its own. Boxes,
pages, clamping and copies are decode's (decode/load.py); hidden values are taken out where they are multiplied."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...nvidia.pipelines import producer_state
from ..decode.load import find_boxes, load_boxes
from ..decode.schedule import item_at, next_item
from .context import half_tile, rope_tile
from .load import gather_parts


@gluon.jit
def load_halves(ctx):
    """Load every tile of this CTA's range, in order."""
    config: gl.constexpr = ctx.config
    k_state = producer_state(config.rope_stages)
    v_state = producer_state(config.stages)
    cursor = ctx.start
    while cursor.unit < ctx.end:
        item = item_at(ctx, cursor)
        if config.gathers:
            for i in range(item.begin, item.end):
                k_state, v_state = gather_tile(ctx, k_state, v_state, item, i)
        else:
            boxes = find_boxes(ctx, item, item.begin)
            for i in range(item.begin, item.end):
                following = find_boxes(ctx, item, gl.minimum(i + 1, item.end - 1))
                k_state, v_state = load_parts(ctx, k_state, v_state, item, boxes)
                boxes = following
        cursor = next_item(cursor, item, ctx.work.heads)


@gluon.jit
def load_parts(ctx, k_state, v_state, item, boxes):
    """A key tile into the next slots, the rotary part first; returns the states after it."""
    config: gl.constexpr = ctx.config
    k, v = ctx.keys.k.desc, ctx.keys.v.desc
    k_state = load_boxes(ctx, k, ctx.rings.k, k_state, item, boxes, config.rope_bytes, config.dim_v)
    v_state = load_boxes(ctx, v, ctx.rings.v, v_state, item, boxes, config.half_bytes)
    v_state = load_boxes(ctx, v, ctx.rings.v, v_state, item, boxes, config.half_bytes, config.half)
    return k_state, v_state


@gluon.jit
def gather_tile(ctx, k_state, v_state, item, i):
    """The same for key tile number `i` of pages that no box divides."""
    rings = ctx.rings
    after = v_state.step()
    k_full = rings.k.producer_acquire(k_state)
    left_full = rings.v.producer_acquire(v_state)
    right_full = rings.v.producer_acquire(after)
    gather_parts(ctx, item, i, half_tile(ctx, v_state), half_tile(ctx, after), rope_tile(ctx, k_state))
    mbarrier.arrive(k_full, count=1)
    mbarrier.arrive(left_full, count=1)
    mbarrier.arrive(right_full, count=1)
    return k_state.step(), after.step()
