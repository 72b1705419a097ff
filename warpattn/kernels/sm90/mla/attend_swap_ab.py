"""The consumer warpgroup of latent attention for up to 16 query rows, with swap-AB as in decode: latents are the left
operands of both products, queries and P the right ones.

      Sᵀ [64, 16]   =  rotary part [64, 64] · Qᵀ  +  left half [64, 256] · Qᵀ  +  right half · Qᵀ
      Oᵀ [256, 16] +=  left half ᵀ [256, 64] · Pᵀ [64, 16];  the same of the right half

Tiles of 64 query rows would be mostly padding: they take 72 KiB of shared memory, and wgmma reads as much of them as of
the latents. With 16 rows, all columns of the output take 64 registers a thread, so one warpgroup holds them and P need
not go to another one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ...nvidia.opaque import hide_from_compiler
from ...nvidia.pipelines import consumer_state
from ...pieces.combine import to_layout
from ...pieces.modifiers import natural_scale
from ...pieces.softmax import LOWEST, finish_rows
from ..decode.attend import without_hidden
from ..decode.attend_swap_ab import any_exceeds, masked_scores, raised, thread_sum
from ..decode.output import combine_item, draw_ticket, publish_parts, write_columns
from ..decode.schedule import item_at, next_item
from ..exponents import exponents
from ..layouts import accumulator_layout, element_type
from .attend import fetch_queries
from .context import TileSlots, half_tile, rope_tile, tile_slots
from .eight_bit_swap_ab import attend_narrow_keys, fetch_fractions, finish_blocks, no_narrow_keys


@gluon.aggregate
class SwapAbLatents:
    """Loop state of one item, as decode's `SwapAbProgress`."""

    left: gl.tensor  # [256, R] fp32, the output's first 256 columns
    right: gl.tensor
    m: gl.tensor  # [R]
    l: gl.tensor  # [4, 8, R]
    slots: TileSlots


@gluon.jit
def attend_swap_ab_role(ctx):
    """Does every work item of this CTA's range."""
    cursor = ctx.start
    slots = tile_slots(ctx.config, consumer_state)
    while cursor.unit < ctx.end:
        item = item_at(ctx, cursor)
        state = attend_item(ctx, slots, item)
        cursor = next_item(cursor, item, ctx.work.heads)
        finish_columns(ctx, state, item)
        slots = state.slots


@gluon.jit
def attend_item(ctx, slots, item):
    """The state of an item after its last key; its first tile is in `slots`."""
    if ctx.config.latents is None:
        fetch_queries(ctx, item)
        state = no_keys(ctx.config, slots)
        for i in range(item.begin, item.end):
            state = attend_keys(ctx, state, item, i)
    else:
        state = no_narrow_keys(ctx.config, slots, fetch_fractions(ctx, item))
        for i in range(item.begin, item.end):
            state = attend_narrow_keys(ctx, state, item, i)
    return state


@gluon.jit
def no_keys(config: gl.constexpr, slots):
    """The state before an item's first key."""
    layout: gl.constexpr = accumulator_layout(config.rows)
    o = gl.zeros([config.half, config.rows], gl.float32, layout)
    m = gl.full([config.rows], LOWEST, gl.float32, gl.SliceLayout(0, layout))
    l = thread_sum(gl.zeros([config.block_n, config.rows], gl.float32, layout))
    return SwapAbLatents(o, o, m, l, slots)


@gluon.jit
def attend_keys(ctx, state, item, i):
    """Does key tile number `i`: scores, softmax, and P·V."""
    config: gl.constexpr = ctx.config
    rings = ctx.rings
    slots = state.slots
    s = latent_scores(ctx, slots)
    rings.k.consumer_release(slots.rope)
    s = masked_scores(ctx, s, item, i)
    m, l, left, right = state.m, state.l, state.left, state.right
    x = exponents(ctx, s, m[None, :])
    if any_exceeds(x):
        m, l, step = raised(ctx, s, m, l)
        alpha = gl.exp2(step)[None, :]
        left = left * alpha
        right = right * alpha
        x = exponents(ctx, s, m[None, :])
    p = gl.exp2(x)
    rings.p.index(0).permute((1, 0)).store(p.to(element_type(config.element)))
    fence_async_shared()
    gl.barrier()
    left = without_hidden(ctx, left, half_tile(ctx, slots.left), item, i, 1)
    right = without_hidden(ctx, right, half_tile(ctx, slots.right), item, i, 1)
    weights = rings.p.index(0).permute((1, 0))
    left = warpgroup_mma(half_tile(ctx, slots.left).permute((1, 0)), weights, left, is_async=True)
    right = warpgroup_mma(half_tile(ctx, slots.right).permute((1, 0)), weights, right, is_async=True)
    left = warpgroup_mma_wait(1, deps=(left,))
    rings.v.consumer_release(slots.left)
    right = warpgroup_mma_wait(0, deps=(right,))
    rings.v.consumer_release(slots.right)
    return SwapAbLatents(left, right, m, l + thread_sum(p), slots.step())


@gluon.jit
def latent_scores(ctx, slots):
    """K·Qᵀ [N, R] of a tile; multiplies each part of the tile once it has arrived."""
    config: gl.constexpr = ctx.config
    rings = ctx.rings
    here = hide_from_compiler(0)  # known addresses would take registers for each of 36 wgmmas, and spill
    s = gl.zeros([config.block_n, config.rows], gl.float32, accumulator_layout(config.rows))
    rings.k.consumer_wait(slots.rope)
    q_rope = rings.q_rope.index(here).permute((1, 0))
    s = warpgroup_mma(rope_tile(ctx, slots.rope), q_rope, s, use_acc=False, is_async=True)
    rings.v.consumer_wait(slots.left)
    s = warpgroup_mma(half_tile(ctx, slots.left), rings.q.index(here).permute((1, 0)), s, is_async=True)
    rings.v.consumer_wait(slots.right)
    s = warpgroup_mma(half_tile(ctx, slots.right), rings.q.index(here + 1).permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(0, deps=(s,))


@gluon.jit
def finish_columns(ctx, state, item):
    """Stores the result of an item, or its part of a split head; the CTA with the last part may combine all."""
    config: gl.constexpr = ctx.config
    publish_parts(ctx, item)
    l = gl.convert_layout(gl.sum(gl.sum(state.l, 1), 0), state.m.type.layout)
    factor, denominator = finish_rows(state.m, l, natural_scale(ctx), l != 0)
    if config.latents is None:
        rows: gl.constexpr = gl.SliceLayout(1, columns_by_rows(config.rows, config.half))
        denominator = to_layout(denominator, rows)
        write_columns(ctx, by_rows(state.left * factor[None, :]), denominator, item, gl.to_tensor(0), 0)
        write_columns(ctx, by_rows(state.right * factor[None, :]), denominator, item, gl.to_tensor(0), config.half)
    else:
        finish_blocks(ctx, state, factor, denominator, item)
    if not config.combine.separate_kernel:
        if item.part.splits > 1:
            if draw_ticket(ctx, item):
                combine_item(ctx, item)


@gluon.constexpr_function
def columns_by_rows(rows, cols):
    """Registers of a block [R, cols] of the output: each element is in the warp that has it in an accumulator
    [cols, R]; a thread has four contiguous columns, and four lanes share a row."""
    registers = [[0, 1], [0, 2], *([8 << i, 0] for i in range((rows // 8).bit_length() - 1))]
    registers += [[0, 64 << i] for i in range((cols // 64).bit_length() - 1)]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 16], [0, 32]], [], [rows, cols])


@gluon.jit
def by_rows(o):
    """Transposes an accumulator [cols, R] to rows of the output [R, cols]; elements stay in their warp."""
    return gl.convert_layout(o.permute((1, 0)), columns_by_rows(o.shape[1], o.shape[0]))
