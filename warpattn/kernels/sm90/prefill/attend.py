"""Consumer warpgroup of the Hopper kernel: 64 query rows through S = Q·Kᵀ, softmax and O = P·V.

The tensor core always has the next product queued while the softmax runs on ordinary units:

      tensor core   QK(0)          QK(1) PV(0)          QK(2) PV(1)    ...   PV(last) QK'(0)
      softmax              p(0)               p(1)             p(2)                    store O, p'(0)

The warpgroup starts the first product of the next tile (QK'), too, before it writes this tile's output.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait

from ...nvidia.pipelines import PipelineState, consumer_state
from ...pieces.modifiers import exponent_scale
from ...pieces.softmax import SoftmaxState, pack, rescale, softmax_start, softmax_step, unpack
from ...pieces.span import tile_span
from ..layouts import accumulator_layout, element_type, operand_layout, turn_asm
from .epilogue import store_output
from .packed_rows import mask_heads, row_tokens


@gluon.aggregate
class Progress:
    """Loop state of one tile: the accumulator, the softmax state, and P of the product still to be issued."""

    o: gl.tensor  # [64, Dv] fp32
    p: gl.tensor  # [64, N] rounded and packed in pairs
    softmax: SoftmaxState
    k: PipelineState
    v: PipelineState


@gluon.aggregate
class QueryTile:
    """The queries of the current tile."""

    q_state: PipelineState
    q: gl.shared_memory_descriptor  # [64, D] of this warpgroup


@gluon.jit
def attend_role(ctx, wg: gl.constexpr):
    """Run one warpgroup until the producer publishes that no tile is left."""
    config: gl.constexpr = ctx.config
    rings = ctx.rings
    q_state = consumer_state(config.q_stages)
    k_state = consumer_state(config.kv_stages)
    v_state = consumer_state(config.kv_stages)
    if wg == config.consumers - 1:
        turn_pass(wg, config)

    rings.q.consumer_wait(q_state)
    q_tile = query_tile(ctx, q_state, wg)
    tile = ctx.work.read(rings.tiles, q_state.index)
    rings.k.consumer_wait(k_state)
    s = start_scores(ctx, q_tile, k_state)
    s = warpgroup_mma_wait(0, deps=(s,))
    while tile.row >= 0:
        rings.k.consumer_release(k_state)
        span = tile_span(ctx.mods.key_span(tile, ctx.work.lengths(tile), config.tokens), config.block_n)
        rings.q.consumer_release(q_state, span.total == 1)
        state = first_tile(ctx, s, tile, span, wg, k_state.step(), v_state)
        queries = QueryTile(q_state, q_tile)
        for i in range(1, span.total):
            state = advance(ctx, state, tile, queries, span, i, wg)

        # Last P·V of this tile and first Q·K of the next one; the latter runs while the output is written.
        rings.v.consumer_wait(state.v)
        turn_wait(wg, config)
        o = start_output(ctx, state)
        q_state = q_state.step()
        rings.q.consumer_wait(q_state)
        q_tile = query_tile(ctx, q_state, wg)
        following = ctx.work.read(rings.tiles, q_state.index)
        rings.k.consumer_wait(state.k, following.row >= 0)
        s = start_scores(ctx, q_tile, state.k)
        turn_pass(wg, config)
        o = warpgroup_mma_wait(1, deps=(o, state.p))[0]
        rings.v.consumer_release(state.v)
        store_output(ctx, o, state.softmax, tile, wg)
        s = warpgroup_mma_wait(0, deps=(s,))
        k_state = state.k
        v_state = state.v.step()
        tile = following
    tma.store_wait(0)  # shared memory must outlive the last store's reads


@gluon.jit
def first_tile(ctx, s, tile, span, wg: gl.constexpr, k_state, v_state):
    """Softmax of a tile's first scores."""
    config: gl.constexpr = ctx.config
    s = visible_scores(ctx, s, tile, span.key_tile(0), span.masked > 0, wg)
    softmax, p = softmax_start(s, exponent_scale(ctx), ctx.mods.score is not None)
    o = gl.zeros([config.rows, config.padded_v], gl.float32, accumulator_layout(config.padded_v))
    return Progress(o, pack(p, element_type(config.element)), softmax, k_state, v_state)


@gluon.jit
def advance(ctx, state, tile, queries, span, i, wg: gl.constexpr):
    """Key tile number `i` >= 1: start Q·K(i) and P·V(i-1), then the softmax of i beside P·V(i-1). The last Q·K of a
    tile releases its queries."""
    config: gl.constexpr = ctx.config
    ctx.rings.k.consumer_wait(state.k)
    turn_wait(wg, config)
    s = start_scores(ctx, queries.q, state.k)
    ctx.rings.v.consumer_wait(state.v)
    o = start_output(ctx, state)
    turn_pass(wg, config)
    s = warpgroup_mma_wait(1, deps=(s,))
    ctx.rings.k.consumer_release(state.k)
    ctx.rings.q.consumer_release(queries.q_state, i == span.total - 1)
    s = visible_scores(ctx, s, tile, span.key_tile(i), i < span.masked, wg)
    return finish_keys(ctx, state, s, o)


@gluon.jit
def finish_keys(ctx, state, s, o):
    """The softmax of scores beside the running P·V, whose result is `o`; and the state after both."""
    softmax, p, moved, alpha = softmax_step(state.softmax, s, exponent_scale(ctx), ctx.mods.score is not None)
    o = warpgroup_mma_wait(0, deps=(o, state.p))[0]
    ctx.rings.v.consumer_release(state.v)
    if moved:
        o = rescale(o, alpha)
    return Progress(o, pack(p, element_type(ctx.config.element)), softmax, state.k.step(), state.v.step())


@gluon.jit
def start_scores(ctx, q_tile, k_state):
    """Start S = Q·Kᵀ with the K tile of a slot; the result may be read after a wait."""
    config: gl.constexpr = ctx.config
    layout: gl.constexpr = accumulator_layout(config.block_n)
    k_tile = ctx.rings.k.tile(k_state).reshape([config.block_n, config.padded_qk]).permute((1, 0))
    zero = gl.zeros([config.rows, config.block_n], gl.float32, layout)
    return warpgroup_mma(q_tile, k_tile, zero, use_acc=False, is_async=True)


@gluon.jit
def start_output(ctx, state):
    """Start O += P·V with the V tile of the state's slot; the result may be read after a wait."""
    v_tile = ctx.rings.v.tile(state.v).reshape([ctx.config.block_n, ctx.config.padded_v])
    return warpgroup_mma(operand(state.p, ctx.config), v_tile, state.o, is_async=True)


@gluon.jit
def visible_scores(ctx, s, tile, key_tile, masked, wg: gl.constexpr):
    """Score function on one tile of products and, if the tile is `masked`, the mask and the end of the keys."""
    config: gl.constexpr = ctx.config
    layout: gl.constexpr = accumulator_layout(config.block_n)
    lengths = ctx.work.lengths(tile)
    offset = tile.row + wg * config.wg_tokens + lengths.seq_k - lengths.seq_q
    q = (offset + row_tokens(gl.SliceLayout(1, layout), config))[:, None]
    heads = mask_heads(tile, gl.SliceLayout(1, layout), config)
    k = (key_tile * config.block_n + gl.arange(0, config.block_n, gl.SliceLayout(0, layout)))[None, :]
    if ctx.mods.score is not None:
        s = ctx.mods.apply_score(s, ctx.scale, heads, lengths, q, k)
    if masked:
        s = ctx.mods.apply_mask(s, heads, lengths, q, k)
        if (key_tile + 1) * config.block_n > lengths.seq_k:
            s = gl.where(k < lengths.seq_k, s, -float("inf"))
    return s


@gluon.jit
def operand(p, config: gl.constexpr):
    """Packed P as the left operand [64, N] of P·V."""
    p = unpack(p, element_type(config.element))
    return gl.convert_layout(p, operand_layout(config.padded_v), assert_trivial=True)


@gluon.jit
def query_tile(ctx, q_state, wg: gl.constexpr):
    """This warpgroup's [64, D] queries in a slot of the Q ring."""
    return ctx.rings.q.tile(q_state, wg).reshape([ctx.config.rows, ctx.config.padded_qk])


@gluon.jit
def turn_wait(wg: gl.constexpr, config: gl.constexpr):
    """Wait for this warpgroup's turn to issue to the tensor core."""
    if config.take_turns:
        gl.inline_asm(turn_asm("sync", wg))


@gluon.jit
def turn_pass(wg: gl.constexpr, config: gl.constexpr):
    """Pass the turn to the next warpgroup."""
    if config.take_turns:
        gl.inline_asm(turn_asm("arrive", (wg + 1) % config.consumers))
