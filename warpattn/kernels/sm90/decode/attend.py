"""The consumer warpgroup of Hopper's decode kernel for 64 query rows (attend_swap_ab.py: for 8, 16 or, with 8-bit keys,
32).

for every work item:   queries to shared memory, then per key tile   Q·K(i+1)  P·V(i) ‖ softmax(i+1)

Before P·V, hidden NaN and infinite values are removed from V tiles (finite.py); the row tile's span says where to look:

      keys   first ···· full_lo ················ full_hi ···· last
       cleared │   seen by some │ seen by all │ seen by some │ cleared
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from ...nvidia.finite import any_nonfinite
from ...nvidia.pipelines import consumer_state
from ...pieces.softmax import pack
from ..columns import wait_columns, zero_columns
from ..finite import clear_outside, nonfinite_value, take_nonfinite
from ..layouts import accumulator_layout, element_type
from ..prefill.attend import Progress, finish_keys, start_output, start_scores, start_softmax
from .context import Lens, query_elements, rows_of
from .eight_bit import column_of
from .output import finish_item
from .schedule import item_at, next_item


@gluon.jit
def attend_role(ctx):
    """Does every work item of this CTA's range."""
    config: gl.constexpr = ctx.config
    k_state = consumer_state(config.stages)
    v_state = consumer_state(config.stages)
    cursor = ctx.start
    while cursor.unit < ctx.end:
        item = item_at(ctx, cursor)
        load_queries(ctx, item)
        ctx.rings.k.consumer_wait(k_state)
        s = start_keys(ctx, k_state)
        s = warpgroup_mma_wait(0, deps=(s,))
        ctx.rings.k.consumer_release(k_state)
        state = first_keys(ctx, s, item, k_state.step(), v_state)
        for i in range(item.begin + 1, item.end):
            state = advance_keys(ctx, state, item, i)
        cursor = next_item(cursor, item, ctx.work.heads)
        state = wait_values(ctx, state, item, item.end - 1)
        o = start_output(state, (value_tile(ctx, state.v),), config)
        o = wait_columns(0, o, state.p)
        ctx.rings.v.consumer_release(state.v)
        finish_item(ctx, o[0], state.softmax, item)
        k_state = state.k
        v_state = state.v.step()


@gluon.jit
def load_queries(ctx, item):
    """Copies queries [rows, D] to shared memory; rows and columns past the end are 0."""
    config: gl.constexpr = ctx.config
    lanes: gl.constexpr = min(config.padded_qk // 8, 32)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])
    at, there, _ = query_elements(ctx, item, layout)
    q = gl.load(at, mask=there, other=0.0)
    gl.barrier()  # all warps have read the previous item's queries
    ctx.rings.q.store(q)
    fence_async_shared()
    gl.barrier()


@gluon.jit
def first_keys(ctx, s, item, k_state, v_state):
    """The state after the first key tile, whose scores are `s`."""
    config: gl.constexpr = ctx.config
    s = decode_scores(ctx, s, item, item.begin)
    softmax, p = start_softmax(ctx, s)
    o = zero_columns(config.rows, (config.padded_v,))
    return Progress(o, pack(p, element_type(config.element)), softmax, k_state, v_state)


@gluon.jit
def start_keys(ctx, k_state):
    """Starts S = Q·Kᵀ with the K tile of a slot; S may be read after a wait."""
    config: gl.constexpr = ctx.config
    k_tile = ctx.rings.k.tile(k_state).reshape([config.block_n, config.padded_qk])
    return start_scores((ctx.rings.q,), (k_tile,), config)


@gluon.jit
def value_tile(ctx, v_state):
    """The values [N, Dv] in a slot of the V ring."""
    return ctx.rings.v.tile(v_state).reshape([ctx.config.block_n, ctx.config.padded_v])


@gluon.jit
def advance_keys(ctx, state, item, i):
    """Does key tile number `i`: starts Q·K(i) and P·V(i-1), and computes the softmax of i while P·V(i-1) runs."""
    state = wait_values(ctx, state, item, i - 1)
    ctx.rings.k.consumer_wait(state.k)
    s = start_keys(ctx, state.k)
    o = start_output(state, (value_tile(ctx, state.v),), ctx.config)
    s = warpgroup_mma_wait(1, deps=(s,))
    ctx.rings.k.consumer_release(state.k)
    return finish_keys(ctx, state, decode_scores(ctx, s, item, i), o, False)


@gluon.jit
def wait_values(ctx, state, item, i):
    """Waits for V of key tile number `i` and removes hidden NaN and infinite values; returns the new state."""
    ctx.rings.v.consumer_wait(state.v)
    o = without_hidden(ctx, state.o[0], value_tile(ctx, state.v), item, i, 0)
    return Progress((o,), state.p, state.softmax, state.k, state.v)


@gluon.jit
def without_hidden(ctx, o, tile, item, i, axis: gl.constexpr):
    """Zeroes hidden values in the V `tile` [N, Dv] of key tile number `i`, so that P·V may read it. Adds values that
    are not finite to `o` in the rows that see them. Returns `o`, whose rows are along `axis`."""
    config: gl.constexpr = ctx.config
    if config.schedule.has_lengths or ctx.mods.keep is not None:
        if item.number(i) < item.row_tile.span.masked:
            keys = item.row_tile.keys
            first = item.key_tile(i) * config.block_n
            begin, end = keys.first - first, keys.last - first
            copied = end < config.block_n
            if not config.schedule.has_lengths:
                copied = keys.last < item.row_tile.length  # TMA writes zeros past the last key
            if (begin > 0) | copied:
                clear_outside(tile, begin, end)
            if ctx.mods.keep is not None:
                seen_by_all = (keys.full_lo < keys.full_hi) & (gl.maximum(first, keys.first) >= keys.full_lo)
                seen_by_all &= gl.minimum(first + config.block_n, keys.last) <= keys.full_hi
                if not seen_by_all:
                    if any_nonfinite(tile):
                        o = with_nonfinite(ctx, o, tile, item, first, axis)
    return o


@gluon.jit
def with_nonfinite(ctx, o, tile, item, first, axis: gl.constexpr):
    """Adds NaN and infinities of a V tile, whose first key is `first`, to `o` in the rows that see them; zeroes them in
    the tile."""
    row_tile = item.row_tile
    row = gl.arange(0, o.shape[axis], gl.SliceLayout(1 - axis, o.type.layout)).expand_dims(1 - axis)
    rows = rows_of(ctx, item, row)
    lens = Lens(row_tile.tokens, row_tile.length)
    q = rows.token + row_tile.length - row_tile.tokens
    columns = gl.arange(0, tile.shape[1], gl.BlockedLayout([1], [32], [4], [0]))
    if ctx.config.eight_bit is not None:
        columns = column_of(columns, ctx.config)
    for j in range(ctx.config.block_n):
        kind = gl.convert_layout(take_nonfinite(tile, j, columns), gl.SliceLayout(axis, o.type.layout))
        sees = ctx.mods.keeps(rows, lens, q, first + j, first + j)
        o = gl.where(sees, o + nonfinite_value(kind).expand_dims(axis), o)
    fence_async_shared()
    gl.barrier()
    return o


@gluon.jit
def decode_scores(ctx, s, item, i):
    """Applies the score function to `s` = Q·Kᵀ of key tile number `i` and, if the tile is masked, the mask and the end
    of the sequence."""
    config: gl.constexpr = ctx.config
    layout: gl.constexpr = accumulator_layout(config.block_n)
    row = gl.arange(0, config.rows, gl.SliceLayout(1, layout))[:, None]
    key = gl.arange(0, config.block_n, gl.SliceLayout(0, layout))[None, :]
    return visible_scores(ctx, s, item, i, row, key)


@gluon.jit
def visible_scores(ctx, s, item, i, row, key):
    """`decode_scores` for scores of any shape, to which `row` (of the item's tile) and `key` (of the key tile)
    broadcast."""
    config: gl.constexpr = ctx.config
    row_tile = item.row_tile
    first = item.key_tile(i) * config.block_n
    k = first + key
    rows = rows_of(ctx, item, row)
    lens = Lens(row_tile.tokens, row_tile.length)
    q = rows.token + row_tile.length - row_tile.tokens
    if ctx.mods.score is not None:
        s = ctx.mods.apply_score(s, ctx.scale, rows, lens, q, k)
    if item.number(i) < row_tile.span.masked:
        s = ctx.mods.apply_mask(s, rows, lens, q, k)
        if first + config.block_n > row_tile.length:
            s = gl.where(k < row_tile.length, s, -float("inf"))
    return s
