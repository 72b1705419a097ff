"""The consumer warpgroup of Hopper's prefill kernels: S = Q·Kᵀ, softmax and O += P·V for 64 query rows.

The softmax of one key tile runs on the ordinary units while the tensor core executes the products queued before it:

      tensor core   QK(0)          QK(1) PV(0)          QK(2) PV(1)    ...   PV(last) QK'(0)
      softmax              p(0)               p(1)             p(2)                    store O, p'(0)

Before it stores this tile's output, the warpgroup also starts the first product of the next query tile (QK').
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait

from ...nvidia.pipelines import PipelineState, consumer_state
from ...pieces.modifiers import exponent_scale
from ...pieces.softmax import SoftmaxState, as_quads, from_quads, pack, softmax_start, softmax_step, unpack
from ..columns import as_matrices, rescale_columns, wait_columns, zero_columns
from ..exact_columns import add_product, without_padding
from ..layouts import TURNS, accumulator_layout, element_type, operand_layout, turn_asm
from ..softmax_steps import early_exact_step, exact_start, exact_step, maximum_start, maximum_step, weights_first
from .eight_bit.convert import fp16_queries
from .eight_bit.scales import key_block_scales, of_tile, scaled_scores, scaled_weights
from .eight_bit.weights import lift_of, pack_bytes, packs_early, plain_bytes, start_bytes, step_bytes, unpack_bytes
from .epilogue import store_output
from .packed_rows import RowHeads, mask_heads, row_heads, row_tokens


@gluon.aggregate
class Progress:
    """Loop state of one query tile: accumulator, softmax state, P of the next P·V, and the slots of K and V."""

    o: gl.tuple  # parts of [64, Dv] fp32
    p: gl.tensor  # [64, N] rounded and packed: two 16-bit or four 8-bit weights in a register
    softmax: SoftmaxState
    k: PipelineState
    v: PipelineState


@gluon.aggregate
class QueryTile:
    """The slot of the current query tile, and its queries."""

    q_state: PipelineState
    q: gl.tuple  # this warpgroup's [64, D], in parts


@gluon.jit
def attend_role(ctx, wg):
    """Computes query tiles, until the producer publishes that none is left."""
    config: gl.constexpr = ctx.config
    rings = ctx.rings
    q_state = consumer_state(config.q_stages)
    k_state = consumer_state(config.kv_stages)
    v_state = consumer_state(config.v_stages)
    rings.q.consumer_wait(q_state)
    tile = ctx.work.read(rings.tiles, q_state.index)
    q_tile = query_tile(ctx, q_state, tile, wg)
    rings.k.consumer_wait(k_state)
    s = start_scores(q_tile, key_tile(ctx, k_state), config)
    s = warpgroup_mma_wait(0, deps=(s,))
    while tile.row >= 0:
        span = ctx.work.key_tiles(ctx.mods, tile, config)
        s = scaled_scores(ctx, s, key_block_scales(ctx, tile, span.key_tile(0)), k_state, q_state, wg)
        release_keys(ctx, k_state, True)
        scaled = of_tile(ctx, tile, q_state, wg)
        if config.q_stages == 1:
            rings.q.consumer_release(q_state, span.total == 1)
        state = first_tile(scaled, s, tile, span, wg, k_state, v_state)
        for i in range(1, span.total):
            state = advance(scaled, state, tile, QueryTile(q_state, q_tile), span, i, wg)
        if config.q_stages > 1:
            rings.q.consumer_release(q_state)
        wait_full(rings.v, state.v, config)
        turn_wait(wg, config)
        o = start_output(state, value_tile(ctx, state.v), config)
        if not config.overlaps:
            o = wait_columns(0, o, state.p)
        if config.changes_queries:
            turn_pass(wg, config)
        q_state = q_state.step()
        rings.q.consumer_wait(q_state)
        following = ctx.work.read(rings.tiles, q_state.index)
        q_tile = query_tile(ctx, q_state, following, wg)
        if config.changes_queries:
            turn_wait(wg, config)
        rings.k.consumer_wait(state.k, following.row >= 0)
        s = start_scores(q_tile, key_tile(ctx, state.k), config)
        turn_pass(wg, config)
        if config.overlaps:
            o = wait_columns(len(config.qk_chains), o, state.p)
        rings.v.consumer_release(state.v)
        store_output(scaled, o, state.softmax, tile, wg)
        s = warpgroup_mma_wait(0, deps=(s,))
        k_state = state.k
        v_state = state.v.step()
        tile = following
    tma.store_wait(0)  # shared memory must outlive the last store's reads


@gluon.jit
def first_tile(ctx, s, tile, span, wg, k_state, v_state):
    """The state after a tile's first key tile, whose scores are `s`."""
    config: gl.constexpr = ctx.config
    s = visible_scores(ctx, s, tile, span.key_tile(0), span.masked > 0, wg)
    softmax, p = start_softmax(ctx, s)
    p = scaled_weights(ctx, p, s, k_state)
    release_keys(ctx, k_state, False)
    o = zero_columns(config.rows, config.o_parts, config.depth)
    return Progress(o, packed_weights(p, config), softmax, k_state.step(), v_state)


@gluon.jit
def start_softmax(ctx, s):
    """(state, P) of the first scores, see `softmax_start`."""
    c = exponent_scale(ctx)
    if ctx.mods.score is not None:
        return exact_start(s, c, lift_of(ctx.config))
    elif ctx.config.products:
        return start_bytes(s, c)
    elif weights_first(ctx.config, None):
        return softmax_start(s, c)
    else:
        return maximum_start(s, c, ctx.has_lse)


@gluon.jit
def step_softmax(ctx, state, s, move_all):
    """(state, P, moved, alpha) of the next scores, see `softmax_step`; P is packed if `weights_first`."""
    c = exponent_scale(ctx)
    if weights_first(ctx.config, ctx.mods.score):
        step: gl.constexpr = softmax_step if ctx.mods.score is None else early_exact_step
        return step(state, s, c, element_type(ctx.config.weights), ctx.has_lse, move_all)
    elif ctx.mods.score is not None or ctx.config.products:
        return exact_step(state, s, c, lift_of(ctx.config), ctx.has_lse)
    else:
        return maximum_step(state, s, c, ctx.has_lse)


@gluon.jit
def advance(ctx, state, tile, queries, span, i, wg):
    """Does key tile number `i` >= 1: starts Q·K(i) and P·V(i-1), and computes the softmax of i while P·V(i-1) runs.
    Releases the queries after the last Q·K of the query tile, if the next tile's need their slot."""
    config: gl.constexpr = ctx.config
    scales = key_block_scales(ctx, tile, span.key_tile(i))
    if config.overlaps:
        wait_full(ctx.rings.k, state.k, config)
        turn_wait(wg, config)
        s = start_scores(queries.q, key_tile(ctx, state.k), config)
        wait_full(ctx.rings.v, state.v, config)
        o = start_output(state, value_tile(ctx, state.v), config)
        turn_pass(wg, config)
        s = warpgroup_mma_wait(config.value_products, deps=(s,))
    else:
        wait_full(ctx.rings.v, state.v, config)
        turn_wait(wg, config)
        o = start_output(state, value_tile(ctx, state.v), config)
        o = wait_columns(0, o, state.p)
        ctx.rings.v.consumer_release(state.v)
        wait_full(ctx.rings.k, state.k, config)
        s = start_scores(queries.q, key_tile(ctx, state.k), config)
        turn_pass(wg, config)
        s = warpgroup_mma_wait(0, deps=(s,))
    s = scaled_scores(ctx, s, scales, state.k, queries.q_state, wg)
    release_keys(ctx, state.k, True)
    if config.q_stages == 1:
        ctx.rings.q.consumer_release(queries.q_state, i == span.total - 1)
    s = visible_scores(ctx, s, tile, span.key_tile(i), i < span.masked, wg)
    move_all = False
    if ctx.moves_early and ctx.mods.keep is not None:  # rows of a masked first tile may have seen few of its keys
        move_all = (i == 1) & (span.masked > 0) & (span.masked < span.total)
    return finish_keys(ctx, state, s, o, move_all)


@gluon.jit
def finish_keys(ctx, state, s, o, move_all):
    """The state after the softmax of scores `s` and the running P·V into `o`. `move_all`: see `softmax_step`."""
    config: gl.constexpr = ctx.config
    if plain_bytes(config, ctx.mods.score):
        softmax, p, moved, alpha = step_bytes(state.softmax, s, exponent_scale(ctx), move_all)
    else:
        softmax, p, moved, alpha = step_softmax(ctx, state.softmax, s, move_all)
        p = scaled_weights(ctx, p, s, state.k)
    release_keys(ctx, state.k, False)
    if ctx.config.overlaps:
        o = wait_columns(0, o, state.p)
        ctx.rings.v.consumer_release(state.v)
    if moved:
        o = rescale_columns(o, alpha)
    if not packs_early(config, ctx.mods.score):
        p = packed_weights(p, config)
    return Progress(o, p, softmax, state.k.step(), state.v.step())


@gluon.jit
def release_keys(ctx, k_state, before: gl.constexpr):
    """Releases the K slot at the call `before` the softmax, or, if it holds token scales, at the call after it."""
    if (ctx.config.scale_bytes > 0) != before:
        ctx.rings.k.consumer_release(k_state)


@gluon.jit
def packed_weights(p, config: gl.constexpr):
    """Rounds and packs P [64, N/8, 4, 2] to the element of V."""
    if config.products:
        return pack_bytes(p)
    else:
        return pack(p, element_type(config.weights))


@gluon.jit
def start_scores(q, k, config: gl.constexpr):
    """Starts S = Q·Kᵀ, one wgmma chain per part of D; S may be read after a wait."""
    s = gl.zeros([config.rows, config.block_n], gl.float32, accumulator_layout(config.block_n, config.depth))
    for part in gl.static_range(len(q)):
        s = warpgroup_mma(q[part], k[part].permute((1, 0)), s, use_acc=part > 0, is_async=True)
    return s


@gluon.jit
def start_output(state, v, config: gl.constexpr):
    """Starts O += P·V, one product, or one per part of Dv; O may be read after a wait."""
    if config.exact_values:
        return add_product(state.o, state.p, v, config.o_parts, config.weights)
    else:
        o = ()
        for part in gl.static_range(len(v)):
            p = operand(state.p, v[part].shape[1], config)
            o += (warpgroup_mma(p, v[part], state.o[part], is_async=True),)
        return o


@gluon.jit
def visible_scores(ctx, s, tile, key_tile, masked, wg):
    """Applies the score function to one tile of Q·Kᵀ and, if the tile is `masked`, the mask and the sequence end."""
    config: gl.constexpr = ctx.config
    layout: gl.constexpr = accumulator_layout(config.block_n, config.depth)
    lengths = ctx.work.lengths(tile)
    offset = tile.row + wg * config.wg_tokens + lengths.seq_k - lengths.seq_q
    if ctx.mods.score is not None:
        q = (offset + row_tokens(gl.SliceLayout(1, layout), config))[:, None]
        k = (key_tile * config.block_n + gl.arange(0, config.block_n, gl.SliceLayout(0, layout)))[None, :]
        s = ctx.mods.apply_score(s, ctx.scale, mask_heads(tile, gl.SliceLayout(1, layout), config), lengths, q, k)
    if masked:
        s = without_hidden(ctx, s, tile, lengths, offset, key_tile * config.block_n)
    return s


@gluon.jit
def without_hidden(ctx, s, tile, lengths, offset, key):
    """Sets scores of a tile whose first key is `key` to -inf where the mask hides the key or the sequence has ended. A
    mask that hides newer keys hides those past the end, too. `offset`: position of the tile's first query token.

    A thread has columns 8 j + 2 lane + e. 8 j + e is a constant in the code, and `first` (the tile's first key + 2
    lane) is subtracted from the bound instead: with a register for each column the compiler spilled in the key loop.
    """
    config: gl.constexpr = ctx.config
    quads = as_quads(s)
    layout: gl.constexpr = quads.type.layout
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout)))
    eights = gl.arange(0, config.block_n // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    lanes = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout))))
    ones = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
    column = 8 * eights[None, :, None, None] + ones[None, None, None, :]
    first = key + 2 * lanes[None, None, :, None]
    q = (offset + row_tokens(rows, config))[:, None, None, None]
    heads = tile
    if config.packed > 1:
        heads = RowHeads(tile.b, row_heads(tile, rows, config)[:, None, None, None])
    quads = ctx.mods.apply_mask(quads, heads, lengths, q, (first + column, column, first))
    if not ctx.mods.hides_newer:
        if key + config.block_n > lengths.seq_k:
            quads = gl.where(column < lengths.seq_k - first, quads, -float("inf"))
    return from_quads(quads, s)


@gluon.jit
def operand(p, cols: gl.constexpr, config: gl.constexpr):
    """Unpacks P into the left operand [64, N] of P·V, for an accumulator of `cols` columns."""
    if config.products:
        p = unpack_bytes(p, element_type(config.element))
    else:
        p = unpack(p, element_type(config.weights))
    return gl.convert_layout(p, operand_layout(cols, config.depth), assert_trivial=True)


@gluon.jit
def query_tile(ctx, q_state, tile, wg):
    """This warpgroup's [64, D] queries in a slot of the Q ring, in parts; the last `held_parts` are in registers."""
    config: gl.constexpr = ctx.config
    parts = multiplied_queries(ctx, ctx.rings.q.tile(q_state, wg), tile, q_state, wg)
    first: gl.constexpr = len(config.qk_parts) - config.held_parts
    held = ()
    for part in gl.static_range(first, len(parts)):
        held += (parts[part].load(operand_layout(config.block_n)),)
    return parts[:first] + held


@gluon.jit
def multiplied_queries(ctx, slot, tile, q_state, wg):
    """The parts of a warpgroup's queries in its `slot`, converted to fp16 where 8-bit keys need that."""
    config: gl.constexpr = ctx.config
    parts = as_matrices(slot, config.rows, config.qk_parts)
    if config.changes_queries:
        parts = fp16_queries(ctx, slot, parts, tile, q_state, wg)
    return without_padding(parts, config.qk_chains)


@gluon.jit
def key_tile(ctx, k_state):
    """The keys [N, D] in a slot of the K ring."""
    return multiplied_keys(ctx.rings.k.tile(k_state), ctx.config)


@gluon.jit
def multiplied_keys(slot, config: gl.constexpr):
    """The parts of the keys in their `slot`."""
    return without_padding(as_matrices(slot, config.block_n, config.qk_parts), config.qk_chains)


@gluon.jit
def value_tile(ctx, v_state):
    """The values [N, Dv] in a slot of the V ring; 8-bit ones are transposed."""
    config: gl.constexpr = ctx.config
    tile = as_matrices(ctx.rings.v.tile(v_state), config.v_rows, config.v_columns)
    if config.products:
        return (tile[0].permute((1, 0)),)
    else:
        return tile


@gluon.jit
def wait_full(ring, state, config: gl.constexpr):
    """Waits for a tile of K or V: every warp alone, or, without turns, all four together (1 % faster in wide heads)."""
    if config.take_turns:
        ring.warps_wait(state)
    else:
        ring.consumer_wait(state)


@gluon.jit
def turn_wait(wg, config: gl.constexpr):
    """Waits for this warpgroup's turn to issue products to the tensor core."""
    if config.take_turns:
        gl.inline_asm(turn_asm("sync"), "r", [gl.to_tensor(TURNS + wg)])


@gluon.jit
def turn_pass(wg, config: gl.constexpr):
    """Passes the turn to the next warpgroup."""
    if config.take_turns:
        gl.inline_asm(turn_asm("arrive"), "r", [TURNS + gl.where(wg == config.consumers - 1, 0, wg + 1)])
