"""dK and dV of a workgroup's keys: the loop over the query tiles, of all heads of the group, that see them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...pieces.scheduler import Tile
from ..layouts import product_layout
from ..work_tile import WorkTile
from .feed import add_product, load_tile, make_buffers, products
from .walk import first_visit, next_visit
from .weigh import as_operand, weigh
from .work import HELD, key_rows, load_held, numbers_start, query_rows, source, store_held


@gluon.jit
def key_gradients(ctx, work, key, own_strides, results):
    """dk and dv of the keys from `key` on."""
    config: gl.constexpr = ctx.config
    layout: gl.constexpr = product_layout(config)
    rows = key_rows(work, key)
    k = load_held(ctx.reads.k, ctx.strides.k, rows, config.dim_qk, config.padded_qk, config)
    v = load_held(ctx.reads.v, ctx.strides.v, rows, config.dim_v, config.padded_v, config)
    buffers = make_buffers(config)
    dk = gl.zeros([HELD, config.padded_qk], gl.float32, layout)
    dv = gl.zeros([HELD, config.padded_v], gl.float32, layout)
    search, visit = first_visit(ctx, work, key)
    stage = load_visit(ctx, work, buffers, visit)
    while visit.row < work.lengths.seq_q:
        top, delta = tile_numbers(ctx, work, visit)
        search, following = next_visit(ctx, work, key, search)
        ahead = load_visit(ctx, work, buffers, following)
        s, dp = products(buffers, stage, (k, v), delta[None, :], config)
        p, ds = weigh(ctx, s, dp, at_visit(work, visit), key, top[None, :], visit.masked)
        dv = add_product(as_operand(p, config), buffers.second, stage.second, dv, config)
        dk = add_product(as_operand(ds, config), buffers.first, stage.first, dk, config)
        visit = following
        stage = ahead
    store_held(results.dk, own_strides.dk, rows, dk * ctx.scale, config.dim_qk, config)
    store_held(results.dv, own_strides.dv, rows, dv, config.dim_v, config)


@gluon.jit
def at_visit(work, visit):
    """The work with the rows of a visit."""
    rows = Tile(work.rows.b, visit.h, visit.row)
    return WorkTile(rows, work.lengths, work.q_start, work.k_start, work.batch, work.kv_head)


@gluon.jit
def load_visit(ctx, work, buffers, visit):
    """Request Q and dO of a visit; zeros where no tile is left."""
    rows = query_rows(work, visit.h, visit.row)
    sources = source(ctx.reads.q, ctx.strides.q, rows), source(ctx.reads.dout, ctx.strides.dout, rows)
    return load_tile(buffers, sources, visit.row, ctx.config)


@gluon.jit
def tile_numbers(ctx, work, visit):
    """(top, delta) of a visit's rows, see `RowNumbers`; those past the end have an infinite top and so P = 0."""
    lane: gl.constexpr = gl.SliceLayout(0, product_layout(ctx.config))
    at = numbers_start(ctx, work, visit.h) + visit.row + gl.arange(0, ctx.config.block_m, lane)
    return gl.load(ctx.numbers.top + at), gl.load(ctx.numbers.delta + at)
