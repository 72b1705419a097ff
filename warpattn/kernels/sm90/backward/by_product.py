"""The two consumer warpgroups of Hopper's backward above head dim 128, for the same 64 keys. `│` waits for products:

      weigh      │ dV += P · dO     P to shared memory   S' = K · Q'ᵀ   │ │   P' = exp2(S')
      derive     │ dS = P · dP      dK += dS · Q     dP' = V · dO'ᵀ   │ │      dS to shared memory, for `reduce`

dV and dK are accumulated in parts of 128 columns: a kernel of 512 threads has 128 registers a thread before they are
reallocated, too few for a product of 256 columns. P stays in registers as the left operand of dV, and dS as that of dK.
`derive` reads P, times the slope of the score function, from one slot of shared memory. `weigh` stores it after dV has
begun: before, P would take registers twice, and the assembler would wait after every product.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma_wait

from ...nvidia.backward.visits import STAGES, read_visit
from ...nvidia.finite import bound_nonfinite, clear_nonfinite
from ...nvidia.pipelines import consumer_state
from ...pieces.softmax import as_quads, pack
from ..columns import wait_columns, zero_columns
from ..layouts import accumulator_layout, element_type
from .attend import (
    first_scores,
    held_tile,
    row_numbers,
    scaled,
    score_products,
    start_scores,
    start_sums,
    start_value_scores,
    tile_weights,
    value_score_products,
    wait_finite,
)
from .epilogue import acquire, store_keys
from .pairs import tile_of


@gluon.jit
def weigh_role(ctx):
    """Computes P of every query tile, and dV."""
    config: gl.constexpr = ctx.config
    rings = ctx.rings
    dv = zero_columns(config.rows, config.widths_v)
    state = consumer_state(STAGES)  # of the rings of Q and dO
    p_state = consumer_state(config.ds_stages)
    rings.q.consumer_wait(state)
    visit = read_visit(ctx, state)
    wait_finite(ctx, rings.k, consumer_state(1), state, 0, bound_nonfinite)
    s = warpgroup_mma_wait(0, deps=(start_scores(ctx, consumer_state(1), state, first_scores(ctx, state), 0),))
    rings.q.consumer_release(state)
    weights = tile_weights(ctx, s, state, visit, 0)
    while visit.more():
        rings.do.consumer_wait(state)
        pending = start_values(ctx, weights.p, dv, state)
        hand_over(ctx, weights, p_state)
        following = state.step()
        rings.q.consumer_wait(following)
        visit = read_visit(ctx, following)
        s = start_scores(ctx, consumer_state(1), following, first_scores(ctx, following), 0)
        dv = wait_columns(score_products(config), pending, weights.p)
        rings.do.consumer_release(state)
        s = warpgroup_mma_wait(0, deps=(s,))
        rings.q.consumer_release(following)
        weights = tile_weights(ctx, s, following, visit, 0)
        state = following
        p_state = p_state.step()
    rings.do.consumer_wait(state)
    pending = start_values(ctx, weights.p, dv, state)
    hand_over(ctx, weights, p_state)
    dv = wait_columns(0, pending, weights.p)
    acquire(rings.p, p_state.step())  # `derive` has read the last P, and V before that: dV may overwrite V
    store_keys(ctx, ctx.tensors.dv, dv, config.widths_v, rings.v.tile(consumer_state(1)), 0)
    tma.store_wait(0)  # shared memory must outlive the copy's reads


@gluon.jit
def hand_over(ctx, weights, state):
    """Stores P, times the slope, for `derive`."""
    acquire(ctx.rings.p, state)
    ctx.rings.p.tile(state).store(tile_of(weights.sloped, ctx.config))
    ctx.rings.p.producer_commit(state)


@gluon.jit
def start_values(ctx, p, dv, state):
    """Starts dV += P · dO; dV may be read after a wait."""
    config: gl.constexpr = ctx.config
    return start_sums(p, ctx.rings.do, state, dv, config.widths_v, config)


@gluon.jit
def derive_role(ctx):
    """Computes dS of every query tile, and dK."""
    config: gl.constexpr = ctx.config
    rings = ctx.rings
    dk = zero_columns(config.rows, config.widths_qk)
    state = consumer_state(STAGES)
    ds_state = consumer_state(config.ds_stages)  # of the rings of P and dS
    rings.q.consumer_wait(state)
    visit = read_visit(ctx, state)
    wait_finite(ctx, rings.v, consumer_state(1), state, 0, clear_nonfinite)
    rings.do.consumer_wait(state)
    dp = warpgroup_mma_wait(0, deps=(start_value_scores(ctx, state, row_numbers(ctx, rings.delta, state), 0),))
    rings.do.consumer_release(state)
    while visit.more():
        pending, ds = start_keys(ctx, dp, dk, state, ds_state)
        following = state.step()
        rings.do.consumer_wait(following)
        dp = start_value_scores(ctx, following, row_numbers(ctx, rings.delta, following), 0)
        dk = wait_columns(value_score_products(config), pending, ds)
        rings.q.consumer_release(state)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        rings.do.consumer_release(following)
        rings.q.consumer_wait(following)
        visit = read_visit(ctx, following)
        state = following
        ds_state = ds_state.step()
    pending, ds = start_keys(ctx, dp, dk, state, ds_state)
    dk = wait_columns(0, pending, ds)
    # dK may overwrite the Q slot: `weigh` computed its last S before it handed over P, and no more queries are loaded.
    store_keys(ctx, ctx.tensors.dk, scaled(dk, ctx.scale), config.widths_qk, rings.q.tile(state), 0)
    tma.store_wait(0)


@gluon.jit
def start_keys(ctx, dp, dk, state, ds_state):
    """Hands dS of a tile to `reduce`, starts dK += dS · Q; returns (dK, to be waited for; packed dS)."""
    config: gl.constexpr = ctx.config
    rings = ctx.rings
    rings.p.consumer_wait(ds_state)
    p = rings.p.tile(ds_state).load(accumulator_layout(config.block_m)).to(gl.float32)
    rings.p.consumer_release(ds_state)
    ds = pack(as_quads(p * dp), element_type(config.element))
    acquire(rings.ds, ds_state)
    held_tile(rings.ds, ds_state, state, 0).store(tile_of(ds, config))  # with the registers that address P
    fence_async_shared()
    rings.ds.producer_commit(ds_state)
    return start_sums(ds, rings.q, state, dk, config.widths_qk, config), ds
