"""The producer warp of Hopper's prefill kernels: fetches tile numbers and loads Q, K and V into their rings.

It loads key tiles in the order of the mask's span, K one tile ahead of V because consumers start Q·K(n+1) before
P·V(n). It fetches the next tile number when two key tiles of this query tile are left to load: early enough that
their copies hide the atomic, the queries and the first keys, late enough that the longest-first order stays balanced.
It loads the last V tile of a query tile after the next queries, because the slot for it becomes free late.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...nvidia.pipelines import producer_state
from ...pieces.scheduler import fetch_next, resolve_next
from .eight_bit.rings import arriving_queries


@gluon.jit
def load_role(ctx):
    """Loads tiles until none is left, then publishes that."""
    config: gl.constexpr = ctx.config
    work = ctx.work
    counter = ctx.tensors.counter
    k_state = producer_state(config.kv_stages)
    v_state = producer_state(config.v_stages)
    number = gl.program_id(0)
    total = work.total()
    tile = work.tile(number, config.tokens)
    span = work.key_tiles(ctx.mods, tile, config)
    q_state = load_q(ctx, producer_state(config.q_stages), tile)
    k_state = load_first_keys(ctx, k_state, tile, span)
    while number < total:
        late = gl.maximum(span.total - 2, 1)
        k_state, v_state = load_others(ctx, k_state, v_state, tile, span, 1, late)
        taken = fetch_next(counter, work, number)
        k_state, v_state = load_others(ctx, k_state, v_state, tile, span, late, span.total)
        if config.q_stages == 1:
            v_state = load_values(ctx, v_state, tile, span.key_tile(span.total - 1))
        number = resolve_next(counter, work, number, taken)
        next_tile = work.tile(number, config.tokens)
        next_span = work.key_tiles(ctx.mods, next_tile, config)
        if config.q_stages > 1:
            q_state = load_q(ctx, q_state, next_tile)
            v_state = load_values(ctx, v_state, tile, span.key_tile(span.total - 1))
            k_state = load_first_keys(ctx, k_state, next_tile, next_span)
        else:
            k_state = load_first_keys(ctx, k_state, next_tile, next_span)
            q_state = load_q(ctx, q_state, next_tile)
        tile = next_tile
        span = next_span


@gluon.jit
def load_q(ctx, state, tile):
    """Publishes a tile and starts loading the queries of all consumer warpgroups, on one barrier. If no tile is left,
    only publishes that."""
    config: gl.constexpr = ctx.config
    full = ctx.rings.q.producer_acquire(state)
    ctx.work.publish(ctx.rings.tiles, state.index, tile)
    if tile.row >= 0:
        mbarrier.expect(full, config.loaded_q_bytes)
        wgs: gl.constexpr = config.consumers
        for wg in gl.static_range(wgs):
            parts = arriving_queries(ctx.rings.q.tile(state, wg), config)
            ctx.tensors.load_queries(tile, tile.row + wg * config.wg_tokens, full, parts)
    else:
        mbarrier.arrive(full, count=1)
    return state.step()


@gluon.jit
def load_first_keys(ctx, k_state, tile, span):
    """Loads key tile number 0 of a span, if there is a tile."""
    if tile.row >= 0:
        k_state = load_keys(ctx, k_state, tile, span.key_tile(0))
    return k_state


@gluon.jit
def load_others(ctx, k_state, v_state, tile, span, begin, end):
    """Loads K of key tiles `begin` >= 1 up to (without) `end` of a span, each followed by V of the tile before it."""
    for i in range(begin, end):
        k_state = load_keys(ctx, k_state, tile, span.key_tile(i))
        v_state = load_values(ctx, v_state, tile, span.key_tile(i - 1))
    return k_state, v_state


@gluon.jit
def load_keys(ctx, state, tile, key_tile):
    """Loads K of a key tile; returns the next slot's state."""
    ctx.tensors.k.load(ctx, ctx.rings.k_in, state, tile, key_tile, ctx.config.k_bytes // ctx.config.widening)
    return state.step()


@gluon.jit
def load_values(ctx, state, tile, key_tile):
    """Loads V of a key tile; returns the next slot's state."""
    ctx.tensors.v.load(ctx, ctx.rings.v_in, state, tile, key_tile, ctx.config.v_bytes // ctx.config.widening)
    return state.step()
