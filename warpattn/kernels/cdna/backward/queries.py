"""dQ of a workgroup's rows: the loop over the key tiles that they see, and numbers of each row for the other kernel."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...pieces.softmax import LOG2_E, LOWEST
from ...pieces.span import tile_span
from ..feed import first_key
from ..layouts import product_layout
from .feed import add_product, load_tile, make_buffers, products
from .weigh import as_operand, weigh
from .work import (
    HELD,
    Rows,
    load_held,
    numbers_start,
    query_rows,
    source,
    statistics_start,
    store_held,
)


@gluon.jit
def query_gradients(ctx, work, own_strides, out, statistics, results):
    """dq of one tile of rows, their numbers, and their part of the sink's gradient."""
    config: gl.constexpr = ctx.config
    rows = query_rows(work, work.rows.h, work.rows.row)
    do = load_held(ctx.reads.dout, ctx.strides.dout, rows, config.dim_v, config.padded_v, config)
    o = load_held(out, own_strides.out, rows, config.dim_v, config.padded_v, config)
    top, delta = row_numbers(ctx, work, o, do, statistics, results)
    q = load_held(ctx.reads.q, ctx.strides.q, rows, config.dim_qk, config.padded_qk, config)
    keys = ctx.mods.key_span(work.rows, work.lengths, HELD)
    span, end = tile_span(keys, config.block_n), gl.minimum(keys[3], work.lengths.seq_k)
    seen = Rows(work.kv_head, work.k_start, work.batch, gl.to_tensor(0), end)  # what follows may hold NaN
    sources = source(ctx.reads.k, ctx.strides.k, seen), source(ctx.reads.v, ctx.strides.v, seen)
    buffers = make_buffers(config)
    dq = gl.zeros([HELD, config.padded_qk], gl.float32, product_layout(config))
    stage = load_tile(buffers, sources, first_key(span, 0, end, config), config)
    for i in range(gl.where(keys[0] < end, span.total, 0)):
        key = span.key_tile(i) * config.block_n
        ahead = load_tile(buffers, sources, first_key(span, i + 1, end, config), config)
        s, dp = products(buffers, stage, (q, do), delta[:, None], config)
        masked = i < span.masked
        _, ds = weigh(ctx, s, dp, work, key, top[:, None], masked)
        dq = add_product(as_operand(ds, config), buffers.first, finite_keys(ctx, stage.first, masked), dq, config)
        stage = ahead
    store_held(results.dq, own_strides.dq, rows, dq * ctx.scale, config.dim_qk, config)


@gluon.jit
def finite_keys(ctx, keys, masked):
    """K of a tile for the product with dS, which is 0 at hidden keys: what is not finite is 0 where there are any."""
    if len(ctx.keeps) > 0:
        if masked:
            x = keys.to(gl.float32)
            keys = gl.where(x - x == 0, keys, gl.zeros_like(keys))
    return keys


@gluon.jit
def row_numbers(ctx, work, o, do, statistics, results):
    """(top, delta) of the rows, see `RowNumbers`, which are also written, with the part of the sink's gradient."""
    traits: gl.constexpr = ctx.traits
    lane: gl.constexpr = gl.SliceLayout(1, product_layout(ctx.config))
    r = gl.arange(0, HELD, lane)
    there = work.rows.row + r < work.lengths.seq_q
    at = statistics_start(ctx, work) + r
    lse = gl.load(statistics.lse + at, mask=there, other=-float("inf"))
    delta = gl.convert_layout(gl.sum(o.to(gl.float32) * do.to(gl.float32), 1), lane)
    if traits.has_dlse:
        delta -= gl.load(statistics.dlse + at, mask=there, other=0.0)
    seen = lse != -float("inf")
    exponent = gl.where(seen, lse * LOG2_E, float("inf"))
    if traits.has_dsinks:
        sink = gl.load(statistics.sinks + work.rows.h)
        share = gl.where(seen, gl.exp2(sink * LOG2_E - exponent), 0.0)
        gl.store(results.dsinks + sink_part(ctx, work), -gl.sum(share * delta, 0))
    top = gl.where(seen & (delta - delta != 0), LOWEST, exponent)
    delta = gl.where(delta - delta == 0, delta, 0.0)
    own = numbers_start(ctx, work, work.rows.h) + work.rows.row + r
    gl.store(ctx.numbers.top + own, top)
    gl.store(ctx.numbers.delta + own, delta)
    return top, delta


@gluon.jit
def sink_part(ctx, work):
    """Where the part of a tile of rows is."""
    head = work.rows.b.to(gl.int64) * ctx.shape.heads_q + work.rows.h
    return head * ctx.shape.m_tiles + work.rows.row // HELD


@gluon.jit
def no_sink_part(ctx, work, parts):
    """The part of a tile without rows."""
    gl.store(parts + sink_part(ctx, work), 0.0)
