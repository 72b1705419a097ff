"""The consumer warpgroup of Hopper's decode kernel with swap-AB: K and V are the left operands of the products.

The left operand of a wgmma has at least 64 rows, the right one at least 8 columns. With 4 query heads per key head, 60
of 64 query rows would be padding: multiplied, exponentiated, and paid for with power (the SM clock of an H200 falls
from 1980 to 1545 MHz). So the operands swap, and scores and outputs are transposed; R, the query rows, is 8 or 16,
with 8-bit keys also 32:

      Sᵀ [N, R]  =  K [N, D]  · Qᵀ [D, R]       K in shared memory as loaded, its rows on the left
      Oᵀ [Dv, R] += Vᵀ [Dv, N] · P [N, R]       V as loaded, read by columns; P goes through shared memory

Each warp has the scores of its own keys, but P·V sums over all keys, so the four warps need the same reference maximum.
Once a tile they vote, at a barrier, whether any weight would exceed 2^8, or with an LSE 2^5 (pieces/softmax.py); only
then do they compute the maximum over all warps. Each thread keeps its part of the row sums until the item ends. The
warpgroup waits for each product immediately: products are short and leave little to overlap.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ...nvidia.pipelines import PipelineState, consumer_state
from ...pieces.scales import by_token, headroom_of
from ...pieces.softmax import LOWEST
from ..exponents import exponent_step, exponents
from ..layouts import accumulator_layout, element_type
from .attend import load_queries, value_tile, visible_scores, without_hidden
from .eight_bit import (
    block_scales,
    in_order,
    key_products,
    load_scaled_queries,
    rescaled,
    token_scales,
    value_products,
)
from .output_swap_ab import finish_rows, make_exchange, output_rows
from .schedule import item_at, next_item


@gluon.aggregate
class SwapAbProgress:
    """Loop state of one item."""

    o: gl.tensor  # [Dv, R] fp32
    m: gl.tensor  # [R] reference maximum of scores, `LOWEST` while a row has seen no key
    l: gl.tensor  # [4, 8, R] this thread's part of the row sum of weights
    k: PipelineState
    v: PipelineState


@gluon.jit
def attend_swap_ab_role(ctx):
    """Does every work item of this CTA's range."""
    config: gl.constexpr = ctx.config
    k_state = consumer_state(config.stages)
    v_state = consumer_state(config.stages)
    operand: gl.constexpr = element_type(config.operand)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([config.rows, config.block_n], operand)
    p_tiles = ()
    for _ in gl.static_range(config.scale_blocks("v")):
        p_tiles += (gl.allocate_shared_memory(operand, [config.rows, config.block_n], p_layout),)
    exchange = make_exchange(config)
    cursor = ctx.start
    while cursor.unit < ctx.end:
        item = item_at(ctx, cursor)
        scaling = load_rows(ctx, item)
        rows = output_rows(ctx, item)
        state = no_keys(config, k_state, v_state)
        if by_token(config):
            state = attend_scaled_tokens(ctx, state, p_tiles, item, scaling)
        else:
            for i in range(item.begin, item.end):
                state = attend_keys(ctx, state, p_tiles, item, i, scaling)
        cursor = next_item(cursor, item, ctx.work.heads)
        finish_rows(ctx, whole_output(ctx, state, scaling), item, exchange, rows)
        k_state = state.k
        v_state = state.v


@gluon.jit
def load_rows(ctx, item):
    """Copies the item's queries to shared memory; returns the `Scaling` of its products if keys have 8 bits."""
    if ctx.config.eight_bit is not None:
        return load_scaled_queries(ctx, item)
    else:
        return load_queries(ctx, item)


@gluon.jit
def whole_output(ctx, state, scaling):
    """The state after an item's last key; with 8 bits, O is put in column order and multiplied by V's scale."""
    if ctx.config.eight_bit is not None:
        o = in_order(state.o, ctx.config) * scaling.output
        return SwapAbProgress(o, state.m, state.l, state.k, state.v)
    else:
        return state


@gluon.jit
def no_keys(config: gl.constexpr, k_state, v_state):
    """The state before an item's first key."""
    layout: gl.constexpr = accumulator_layout(config.rows)
    o = gl.zeros([config.padded_v, config.rows], gl.float32, layout)
    m = gl.full([config.rows], LOWEST, gl.float32, gl.SliceLayout(0, layout))
    return SwapAbProgress(
        o, m, thread_sum(gl.zeros([config.block_n, config.rows], gl.float32, layout)), k_state, v_state
    )


@gluon.jit
def attend_keys(ctx, state, p_tiles, item, i, scaling):
    """Does key tile number `i`: scores, softmax, and P·V."""
    ctx.rings.k.consumer_wait(state.k)
    s = key_scores(ctx, state.k, scaling)
    ctx.rings.k.consumer_release(state.k)
    s = masked_scores(ctx, s, item, i)
    m = state.m
    l = state.l
    o = state.o
    x = exponents(ctx, s, m[None, :])
    if any_exceeds(x, ctx.has_lse):
        m, l, step = raised(ctx, s, m, l)
        o = o * gl.exp2(step)[None, :]
        x = exponents(ctx, s, m[None, :])
    p = gl.exp2(x)
    o = add_values(ctx, state, (p,), o, p_tiles, item, i)
    return SwapAbProgress(o, m, l + thread_sum(p), state.k.step(), state.v.step())


@gluon.jit
def raised(ctx, s, m, l, guarded: gl.constexpr = True):
    """Raises the references `m` [R] to the maximum of scores `s` [N, R]. Returns (the new references, the sums `l`
    rescaled to them, base-2 exponents [R] of the old references relative to the new)."""
    top = gl.maximum(m, gl.max(s, 0))
    step = exponent_step(ctx, m, top, guarded)
    alpha = gl.convert_layout(gl.exp2(step), gl.SliceLayout(0, gl.SliceLayout(1, l.type.layout)))
    return top, l * alpha[None, None, :], step


@gluon.jit
def attend_scaled_tokens(ctx, state, p_tiles, item, scaling):
    """Does all key tiles of an item if tokens have scales. A value's scale is added to its weight's exponent; so that
    no weight exceeds fp16, whatever the scales, weights of P·V have a reference of their own, `most` (in exponents
    above m). If each block of V's columns has a scale, each block has its own weights and reference.
    """
    blocks: gl.constexpr = len(p_tiles)
    most = ()
    for _ in gl.static_range(blocks):
        most += (gl.zeros_like(state.m),)
    for i in range(item.begin, item.end):
        ctx.rings.k.consumer_wait(state.k)
        k_scale = token_scales(ctx, ctx.rings.scales.k, state.k, "k")
        v_exponents = value_exponents(ctx, state.k)
        s = key_scores(ctx, state.k, scaling) * k_scale[:, None]
        ctx.rings.k.consumer_release(state.k)
        s = masked_scores(ctx, s, item, i)
        x, most, m, l, o = exponents_within(ctx, s, v_exponents, most, state.m, state.l, state.o, rescaled)
        l = l + thread_sum(gl.exp2(x))
        p = ()
        for part in gl.static_range(blocks):
            p += (gl.exp2(with_scale(x, v_exponents[part]) - most[part][None, :]),)
        o = add_values(ctx, state, p, o, p_tiles, item, i)
        state = SwapAbProgress(o, m, l, state.k.step(), state.v.step())
    return SwapAbProgress(rescaled(state.o, powers(most)), state.m, state.l, state.k, state.v)


@gluon.jit
def exponents_within(ctx, s, v_exponents, most, m, l, o, rescale: gl.constexpr):
    """Returns (exponents [N, R] of scores `s`, most, m, l, o). Where a weight, with or without its value's scale, would
    exceed the headroom, it raises the references `m` of scores and `most` of each block's weights first, and rescales
    the sums `l` and, with `rescale`, the output `o`.
    """
    x = exponents(ctx, s, m[None, :], False)
    if any_exceeds(furthest(x, v_exponents, most), ctx.has_lse):
        m, l, step = raised(ctx, s, m, l, False)
        x = exponents(ctx, s, m[None, :], False)
        most, factors = raised_weights(x, v_exponents, most, step)
        o = rescale(o, factors)
    return x, most, m, l, o


@gluon.jit
def with_scale(x, v_exponents):
    """Exponents `x` [N, R] plus the exponents [N] of V's scales; hidden keys stay at -inf."""
    return gl.where(x == -float("inf"), x, x + v_exponents[:, None])


@gluon.jit
def furthest(x, v_exponents, most):
    """The larger of exponents `x` [N, R] and, over all blocks, `x` plus the exponent of V's scale minus the block's
    reference. `maximum` ignores the NaN of hidden keys."""
    beyond = x
    for part in gl.static_range(len(most)):
        beyond = gl.maximum(beyond, x + v_exponents[part][:, None] - most[part][None, :])
    return beyond


@gluon.jit
def raised_weights(x, v_exponents, most, step):
    """Raises each block's reference `most` [R] to the maximum of `x` [N, R] with V's scales, after the reference of
    scores has moved by `step` [R]. Returns (new references, factors [R] for the blocks' outputs)."""
    higher = ()
    factors = ()
    for part in gl.static_range(len(most)):
        before = gl.maximum(most[part] + step, LOWEST)
        top = gl.maximum(before, gl.max(with_scale(x, v_exponents[part]), 0))
        higher += (top,)
        factors += (gl.exp2(before - top),)
    return higher, factors


@gluon.jit
def powers(exponents):
    """2 to the power of each block's exponents [R]."""
    made = ()
    for part in gl.static_range(len(exponents)):
        made += (gl.exp2(exponents[part]),)
    return made


@gluon.jit
def value_exponents(ctx, k_state):
    """log2 of V's scales [N] in a slot, a tuple with an entry per block of columns that has scales."""
    blocks: gl.constexpr = ctx.config.scale_blocks("v")
    if blocks == 1:
        return (gl.log2(token_scales(ctx, ctx.rings.scales.v, k_state, "v")),)
    else:
        found = ()
        for part in gl.static_range(blocks):
            found += (gl.log2(block_scales(ctx, ctx.rings.scales.v, k_state, part)),)
        return found


@gluon.jit
def add_values(ctx, state, p, o, p_tiles, item, i):
    """Adds Vᵀ·P of key tile number `i` to O [Dv, R] and releases the V slot. `p`: weights [N, R], one for each block of
    V's columns that has scales."""
    config: gl.constexpr = ctx.config
    for part in gl.static_range(len(p)):
        p_tiles[part].permute((1, 0)).store(p[part].to(element_type(config.operand)))
    fence_async_shared()
    gl.barrier()
    ctx.rings.v.consumer_wait(state.v)
    v_tile = value_tile(ctx, state.v)
    o = without_hidden(ctx, o, v_tile, item, i, 1)
    if config.eight_bit is not None:
        o = value_products(v_tile, p_tiles, o, config)
    else:
        o = warpgroup_mma(v_tile.permute((1, 0)), p_tiles[0].permute((1, 0)), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=(o,))
    ctx.rings.v.consumer_release(state.v)
    return o


@gluon.jit
def key_scores(ctx, k_state, scaling):
    """K·Qᵀ [N, R] of the K tile in a slot; with 8 bits times the scales."""
    config: gl.constexpr = ctx.config
    k_tile = ctx.rings.k.tile(k_state).reshape([config.block_n, config.padded_qk])
    if config.eight_bit is not None:
        return key_products(ctx, k_tile, k_state) * scaling.scores[None, :]
    else:
        zero = gl.zeros([config.block_n, config.rows], gl.float32, accumulator_layout(config.rows))
        s = warpgroup_mma(k_tile, ctx.rings.q.permute((1, 0)), zero, use_acc=False, is_async=True)
        return warpgroup_mma_wait(0, deps=(s,))


@gluon.jit
def masked_scores(ctx, s, item, i):
    """Applies the score function to `s` [N, R] and, if the key tile is masked, the mask and the sequence end."""
    config: gl.constexpr = ctx.config
    layout: gl.constexpr = s.type.layout
    row = gl.arange(0, config.rows, gl.SliceLayout(0, layout))[None, :]
    key = gl.arange(0, config.block_n, gl.SliceLayout(1, layout))[:, None]
    return visible_scores(ctx, s, item, i, row, key)


@gluon.jit
def thread_sum(x):
    """Sums each thread's elements in a column of an accumulator [N, R]: [warps, 8, R]. Of every 64 rows (4 warps), a
    warp holds 16, and a thread two of those, 8 apart."""
    warps: gl.constexpr = warps_of(x.type.layout)
    parts = x.reshape([x.shape[0] // (16 * warps), warps, 2, 8, x.shape[1]])
    return gl.sum(gl.sum(parts, 2), 0)


@gluon.jit
def any_exceeds(x, has_lse: gl.constexpr = False):
    """Whether any exponent x [N, R] exceeds the headroom; all warps of the role get the same answer."""
    warps: gl.constexpr = warps_of(x.type.layout)
    quads = x.reshape([x.shape[0] // (16 * warps), warps, 2, 8, x.shape[1] // 8, 4, 2])
    top = gl.max(gl.max(gl.max(gl.max(quads, 6), 4), 2), 0)  # [warps, 8, 4], one element a thread
    return gl.inline_asm(vote_asm(warps), "=r,f,f", [top, gl.full_like(top, headroom_of(has_lse))], gl.int32) != 0


@gluon.constexpr_function
def warps_of(layout):
    """Warps that share the rows of an accumulator."""
    return layout.warps_per_cta[0]


@gluon.constexpr_function
def vote_asm(warps):
    """PTX for a vote of `warps` warps on named barrier 15 (the compiler uses 0 to 7)."""
    vote = f"barrier.cta.red.or.pred b, 15, {32 * warps}, a;"
    return f"{{ .reg .pred a, b; setp.gt.f32 a, $1, $2; {vote} selp.b32 $0, 1, 0, b; }}"
