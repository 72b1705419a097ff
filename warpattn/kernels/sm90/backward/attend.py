"""The consumer warpgroup of Hopper's backward: loops over the query tiles that see its 64 keys.

Tiles of scores have keys as rows and queries as columns, so that P and dS stay in registers as the left operands of
dV += P · dO and dK += dS · Q. The order for each query tile, where `│` waits for products:

      dV += P · dO   dP = V · dOᵀ   │   dS = P · dP   dK += dS · Q   dS to shared memory   S' = K · Q'ᵀ   │ │   P'

The accumulators of S and dP start with each query's -lse / scale and -delta instead of 0. The last tile has no S'. P
stays rounded and packed, because registers are the limit (208 a thread; dK and dV alone take 128 at head dim 128): if a
value lives one step longer, the assembler waits after every product. dS = P · dP also waits for dV, or the assembler
copies P. The numbers with which an accumulator starts are loaded while another product runs, since a load takes 200 to
350 cycles beside products that read shared memory (H100). At head dim 64 dP precedes dV, see `values_first`.

Where this warpgroup adds dQ, too (`attend_adds`), dK and dV take 160 of 240 registers, and each of dV, dP, dK and S'
ends before the next begins: with two at once, the assembler would wait after every one. dQ of the tile follows at the
end, when the other warpgroup's dS has long arrived (`add.py`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...nvidia.backward.visits import STAGES, Visit, at_keys, first_visit, following_visit, read_visit
from ...nvidia.finite import bound_nonfinite, clear_nonfinite
from ...nvidia.pipelines import PipelineState, consumer_state
from ...pieces.modifiers import exponent_scale
from ...pieces.softmax import as_quads, pack
from ..column_slices import columns_before, columns_of
from ..columns import wait_columns, zero_columns
from ..exact_columns import add_product
from ..layouts import accumulator_layout, element_type
from .add import NO_TURN, add_tile, say_added
from .epilogue import acquire, staging, store_boxes, store_keys, wait_copies
from .pairs import fp32, multiply_pairs, operand, tile_of


@gluon.aggregate
class Weights:
    """P of a tile, and P times the slope of the score function, d score / d (q·k)."""

    p: gl.tensor  # [64, M/8, 4] pairs
    sloped: gl.tensor  # P itself where the slope is 1


@gluon.aggregate
class Sums:
    """The accumulators of dK and dV, [64, D] fp32."""

    dk: gl.tuple  # in parts of the columns
    dv: gl.tuple


@gluon.jit
def attend_role(ctx, wg: gl.constexpr):
    """Computes dK and dV of the warpgroup's keys, key tile after key tile, and hands dS of every query tile over."""
    state = consumer_state(STAGES)  # of the rings of Q, dO and dS, which have the same number of slots
    held = consumer_state(ctx.config.key_stages)  # of the ring of K
    follows: gl.constexpr = ctx.config.persistent and not ctx.config.attend_adds  # other gradients in the same memory
    visit = first_visit(ctx, ctx.rings.q, state, state)
    while visit.row >= 0:
        state = attend_keys(at_keys(ctx, state), visit, state, held, wg)
        visit = following_visit(ctx, ctx.rings.q, state, state)
        if follows:
            wait_copies()  # of the gradients, whose memory may be overwritten now
        if ctx.config.key_stages > 1 and not ctx.config.stages_in_ds:
            ctx.rings.v.consumer_release(held_values(held))
        held = held.step()
    if not follows:
        tma.store_wait(0)  # shared memory must outlive the last copy's reads


@gluon.jit
def attend_keys(ctx, visit, state, held, wg: gl.constexpr):
    """Computes dK and dV of the warpgroup's part of a key tile, from its first `visit` (of a query tile) on. Returns
    the state of the slot after its last visit."""
    config: gl.constexpr = ctx.config
    rings = ctx.rings
    sums = Sums(zero_columns(config.rows, config.widths_qk), zero_columns(config.rows, config.widths_v))
    wait_finite(ctx, rings.k, held, state, wg, bound_nonfinite)
    s = warpgroup_mma_wait(0, deps=(start_scores(ctx, held, state, first_scores(ctx, state), wg),))
    weights = tile_weights(ctx, s, state, visit, wg)
    wait_finite(ctx, rings.v, held_values(held), state, wg, clear_nonfinite)
    more = visit.more()
    turn = gl.to_tensor(NO_TURN)  # of the dQ tile that was added to last, see `add_tile`
    while more:
        sums, weights, state, visit, turn = attend_tile(ctx, sums, weights, state, turn, held, wg)
        more = visit.more()
    finish_keys(ctx, sums, weights, state, held, turn, wg)
    return state.step()


@gluon.jit
def attend_tile(ctx, sums, weights, state, turn, held, wg: gl.constexpr):
    """Does the query tile in slot `state`, whose P is in `weights`, and starts S of the next one. Returns (dK and dV so
    far; the next tile's P, slot and visit; the turn at this dQ tile)."""
    config: gl.constexpr = ctx.config
    rings = ctx.rings
    dk, dv, ds = start_tile(ctx, sums, weights, state, wg)
    following = state.step()
    rings.q.consumer_wait(following)
    visit = read_visit(ctx, following)
    if config.attend_adds:  # no registers for S beside dS
        hand_over(ctx, ds, state, wg)
        dk = wait_columns(0, dk, ds)
        rings.q.consumer_release(state)
        s = start_scores(ctx, held, following, first_scores(ctx, following), wg)
    else:
        s = first_scores(ctx, following)
        if config.values_first:
            hand_over(ctx, ds, state, wg)
        s = start_scores(ctx, held, following, s, wg)
        dk = wait_columns(score_products(config), dk, ds)
        rings.q.consumer_release(state)
    s = warpgroup_mma_wait(0, deps=(s,))
    weights = tile_weights(ctx, s, following, visit, wg)
    if config.attend_adds:
        turn = add_tile(ctx, state, turn, wg)
    return Sums(dk, dv), weights, following, visit, turn


@gluon.jit
def finish_keys(ctx, sums, weights, state, held, turn, wg: gl.constexpr):
    """Does a key tile's last query tile; stores dK and dV."""
    config: gl.constexpr = ctx.config
    rings = ctx.rings
    if not config.attend_adds:
        rings.k.consumer_release(held)
    dk, dv, ds = start_tile(ctx, sums, weights, state, wg)
    if config.stages_in_ds and config.key_stages > 1:
        rings.v.consumer_release(held_values(held))
    if config.values_first:
        hand_over(ctx, ds, state, wg)
    sums = Sums(wait_columns(0, dk, ds), dv)
    rings.q.consumer_release(state)  # the last of the key tile
    last = at_keys(ctx, state)  # read again instead of kept in registers across the loop
    if config.attend_adds:
        turn = add_tile(ctx, state, turn, wg)
        rings.k.consumer_release(held)
        if config.counted:
            say_added(ctx, state.step(), turn)
        store_boxes(last, sums.dv, scaled(sums.dk, ctx.scale), wg)
    else:
        smem = staging(ctx, state.step(), wg)
        store_keys(last, ctx.tensors.dv, sums.dv, config.widths_v, smem, wg * config.rows)
        wait_copies()
        store_keys(last, ctx.tensors.dk, scaled(sums.dk, ctx.scale), config.widths_qk, smem, wg * config.rows)


@gluon.jit
def wait_finite(ctx, ring, held, state, wg: gl.constexpr, replace: gl.constexpr):
    """Waits for the warpgroup's K or V and, with a mask, makes all of it finite by `replace`, because 0 times a hidden
    NaN is NaN. Query rows that see such a key or value have a shift of NaN instead."""
    ring.consumer_wait(held)
    if ctx.mods.keep is not None:
        boxes: gl.constexpr = ring.parts // ctx.config.key_parts
        for box in gl.static_range(boxes):
            tile = held_tile(ring, held, state, wg * boxes + box)
            replace(tile.reshape([ctx.config.rows, tile.shape[-1]]))


@gluon.jit
def start_tile(ctx, sums, weights, state, wg: gl.constexpr):
    """Computes dV and dS of a tile, starts dK; returns (dK, to be waited for; dV; packed dS)."""
    config: gl.constexpr = ctx.config
    rings = ctx.rings
    rings.do.consumer_wait(state)
    if config.values_first:
        dv = start_sums(weights.p, rings.do, state, sums.dv, config.widths_v, config)
        if config.attend_adds:
            dv = wait_columns(0, dv, weights.p)
        dp = start_value_scores(ctx, state, row_numbers(ctx, rings.delta, state), wg)
    else:
        dp = start_value_scores(ctx, state, row_numbers(ctx, rings.delta, state), wg)
        dv = start_sums(weights.p, rings.do, state, sums.dv, config.widths_v, config)
    dp, dv, p = wait_value_scores(dp, dv, weights.p)
    ds = score_gradients(p if ctx.slope is None else weights.sloped, dp, config)
    rings.do.consumer_release(state)
    if not config.values_first:
        hand_over(ctx, ds, state, wg)
    return start_sums(ds, rings.q, state, sums.dk, config.widths_qk, config), dv, ds


@gluon.jit
def score_gradients(p, dp, config: gl.constexpr):
    """dS = P · dP, rounded and packed. With fp16, dP is not rounded first: where P is 0 it may exceed fp16's range."""
    dtype: gl.constexpr = element_type(config.element)
    if dtype == gl.bfloat16:
        return multiply_pairs(p, pack(as_quads(dp), dtype), config)
    else:
        return pack(as_quads(fp32(p, config) * dp), dtype)


@gluon.jit
def wait_value_scores(dp, dv, p):
    """Waits for the products of dP and dV; returns (dP, dV in parts, P)."""
    operands = (dp, p)
    done = warpgroup_mma_wait(0, deps=operands + dv)
    dp, p = done[:2]
    return dp, done[2:], p


@gluon.jit
def hand_over(ctx, ds, state, wg: gl.constexpr):
    """Hands dS of a tile to the roles that add dQ."""
    rings = ctx.rings
    acquire(rings.ds, state)
    rings.ds.tile(state, wg).store(tile_of(ds, ctx.config))
    fence_async_shared()
    rings.ds.producer_commit(state)


@gluon.jit
def first_scores(ctx, q_state):
    """The initial accumulator of S: -lse / scale, or 0 if a score function has to see S itself."""
    if ctx.mods.score is None:
        return row_numbers(ctx, ctx.rings.shift, q_state)
    else:
        layout: gl.constexpr = accumulator_layout(ctx.config.block_m)
        return gl.zeros([ctx.config.rows, ctx.config.block_m], gl.float32, layout)


@gluon.jit
def start_scores(ctx, held, q_state, first, wg: gl.constexpr):
    """Starts S = K · Qᵀ + first [64, M]."""
    config: gl.constexpr = ctx.config
    widths: gl.constexpr = chain_widths(config, config.widths_qk, config.padded_qk)
    k = held_parts(ctx.rings.k, held, q_state, wg, config.rows, widths)
    return start_chain(k, slot_parts(ctx.rings.q, q_state, config.block_m, widths), first, ctx.mods.score is None)


@gluon.jit
def start_value_scores(ctx, do_state, delta, wg: gl.constexpr):
    """Starts dP = V · dOᵀ + delta [64, M]."""
    config: gl.constexpr = ctx.config
    widths: gl.constexpr = chain_widths(config, config.widths_v, config.padded_v)
    v = held_parts(ctx.rings.v, consumer_state(1), do_state, wg, config.rows, widths)
    return start_chain(v, slot_parts(ctx.rings.do, do_state, config.block_m, widths), delta, True)


@gluon.jit
def start_chain(keys, rows, first, use_first: gl.constexpr):
    """Starts first + keys [64, D] · rowsᵀ, rows [M, D], one wgmma chain for each of their parts."""
    for i in gl.static_range(len(keys)):
        first = warpgroup_mma(keys[i], rows[i].permute((1, 0)), first, use_acc=use_first or i > 0, is_async=True)
    return first


@gluon.constexpr_function
def chain_widths(config, widths, padded):
    """Widths of the parts in which products sum over a head dim; one part if it has no padding and one box."""
    return (padded,) if sum(widths) == padded == config.box(padded) else widths


@gluon.constexpr_function
def score_products(config):
    """Products that `start_scores` starts."""
    return len(chain_widths(config, config.widths_qk, config.padded_qk))


@gluon.constexpr_function
def value_score_products(config):
    """Products that `start_value_scores` starts."""
    return len(chain_widths(config, config.widths_v, config.padded_v))


@gluon.jit
def start_sums(pairs, ring, state, sums, widths: gl.constexpr, config: gl.constexpr):
    """Starts sums += pairs · the tile in a slot of `ring`; the sums may be read after `wait_columns`."""
    if config.exact_sums:
        tile = slot_parts(ring, state, config.block_m, (config.padded,))
        return add_product(sums, pairs, tile, widths, config.element)
    else:
        tile = slot_parts(ring, state, config.block_m, widths)
        parts = ()
        for i in gl.static_range(len(widths)):
            parts += (warpgroup_mma(operand(pairs, config, widths[i]), tile[i], sums[i], is_async=True),)
        return parts


@gluon.jit
def scaled(sums, scale):
    """Multiplies every part by `scale`."""
    parts = ()
    for i in gl.static_range(len(sums)):
        parts += (sums[i] * scale,)
    return parts


@gluon.jit
def slot_parts(ring, state, rows: gl.constexpr, widths: gl.constexpr):
    """The tile in a slot, in parts of the columns, each [rows, columns]."""
    return parts_at(ring, state.index * ring.parts, rows, widths)


@gluon.jit
def held_parts(ring, held, state, part: gl.constexpr, rows: gl.constexpr, widths: gl.constexpr):
    """Tile `part` of slot `held`, in parts of the columns, addressed as in `held_tile`."""
    boxes: gl.constexpr = max(1, columns_before(widths, len(widths)) // ring.smem.shape[-1])
    return parts_at(ring, held_slot(held, state) * ring.parts + part * boxes, rows, widths)


@gluon.jit
def parts_at(ring, first, rows: gl.constexpr, widths: gl.constexpr):
    """A tile, stored as one or several TMA boxes from box `first` of a ring on, in parts of the columns."""
    cols: gl.constexpr = ring.smem.shape[-1]
    parts = ()
    for i in gl.static_range(len(widths)):
        box = ring.smem.index(first + columns_before(widths, i) // cols)
        parts += (columns_of(box.reshape([rows, cols]), widths, i),)
    return parts


@gluon.jit
def held_tile(ring, held, state, part: gl.constexpr):
    """Tile `part` of slot `held`. Its address is computed anew in every iteration, from another ring's `state`: for a
    constant address the compiler keeps a descriptor for each k-step of a product in registers, and spills."""
    return ring.smem.index(held_slot(held, state) * ring.parts + part)


@gluon.jit
def held_values(held):
    """The state of the ring of V, which has one slot, by that of the ring of K."""
    if held.stages == 1:
        return held
    else:
        return PipelineState(gl.to_tensor(0), held.index, 1)


@gluon.jit
def held_slot(held, state):
    """The number of slot `held`, see `held_tile`."""
    if held.stages == 1:
        return opaque_zero(state)
    else:
        return held.index + opaque_zero(state)


@gluon.jit
def opaque_zero(state):
    """0, which the compiler takes for a number that changes: it keeps what is computed from it inside the loop."""
    return state.index >> 8


@gluon.jit
def row_numbers(ctx, numbers, state):
    """Loads the numbers [M] of a slot's queries to every row of a [64, M] accumulator."""
    config: gl.constexpr = ctx.config
    layout: gl.constexpr = accumulator_layout(config.block_m)
    row = numbers.index(state.index).reshape([config.block_m]).load(gl.SliceLayout(0, layout))
    zero = gl.zeros([config.rows, config.block_m], gl.float32, layout)
    return gl.broadcast(row[None, :], zero)[0]


@gluon.jit
def tile_weights(ctx, s, q_state, visit, wg: gl.constexpr):
    """The `Weights` of a tile: P = exp2(S - LSE), 0 where the mask hides a key, and P times the slope of the score."""
    config: gl.constexpr = ctx.config
    layout: gl.constexpr = accumulator_layout(config.block_m)
    dtype: gl.constexpr = element_type(config.element)
    keys, mods = ctx.keys, ctx.mods
    if ctx.slope is not None:
        visit = read_visit(ctx, q_state)  # again, or the compiler computes what depends on indices alone before S
    visit = Visit(keys.b, visit.h, visit.row, visit.flags, visit.turn)  # `b` of this key tile
    key = visit.first_key() + wg * config.rows
    if ctx.slope is not None:
        key += opaque_zero(q_state)  # so that nothing of it is hoisted and kept
    k = (key + gl.arange(0, config.rows, gl.SliceLayout(1, layout)))[:, None]
    # A thread has columns 8 j + {0, 1} relative to its first. Kept apart from the first column they are constants in
    # the code; added to it they would take 16 registers.
    column = gl.arange(0, config.block_m, gl.SliceLayout(0, layout))
    q = (visit.row + keys.seq_k - keys.seq_q + (column & 7) + (column & -8))[None, :]
    slope = s
    if ctx.slope is not None:
        slope = ctx.slope(s * ctx.scale, visit.b, visit.h, q, k, keys.seq_q, keys.seq_k, mods.score_args)
        slope = pack(as_quads(slope + gl.zeros_like(s)), dtype)  # registers do not hold it and S across a branch
    if mods.score is not None:
        s = mods.apply_score(s, ctx.scale, visit, keys, q, k) + row_numbers(ctx, ctx.rings.shift, q_state)
    if visit.masked():
        kept = k < keys.seq_k
        if mods.score is not None:
            kept = kept & (q < keys.seq_k)
        if mods.keep is not None:
            kept = kept & mods.keep(visit.b, visit.h, q, k, keys.seq_q, keys.seq_k, mods.mask_args)
        s = gl.where(kept, s, -float("inf"))
        if ctx.slope is not None:
            slope = pack(as_quads(gl.where(kept, fp32(slope, config), 0.0)), dtype)
    p = pack(gl.exp2(as_quads(s * exponent_scale(ctx))), dtype)
    return Weights(p, p if ctx.slope is None else multiply_pairs(p, slope, config))
