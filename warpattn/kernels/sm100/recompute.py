"""Attention once more for a tile of rows that met hidden values of NaN or infinity: key by key, each row what it sees.

P·V multiplies a hidden value by 0, and 0 times NaN is NaN, in that column of every row of the tile. So the role that
writes the output looks at each row of it, in a few additions; a row that is finite says that no such value was met:

      O ──▶ output, sum of each row ──▶ all of them not finite?  ── no ──▶ end
                                                                 └─ yes ─▶ when all roles have ended: this file

Almost no tile gets here, so the code is short rather than fast, and one for all kernels: it reads queries, keys
and values by their addresses, needs no barrier, and leaves shared and tensor memory alone.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..nvidia.strided import Strided
from ..pieces.modifiers import exponent_scale
from ..pieces.scales import (
    block_scale,
    has_scale,
    has_token_scale,
    head_scale,
    scale_row,
    scaled_rows,
    scores_scale,
)
from ..pieces.softmax import exponent, row_scale
from .prefill_2q.epilogue import finish

WARPS = gl.constexpr(4)
HELD = gl.constexpr(4096)  # elements of queries, and of output, that four warps' registers hold


@gluon.aggregate
class KeyColumns:
    """Columns of queries and of keys whose products are one summand of the scores."""

    q: Strided
    k: Strided
    q_column: gl.constexpr
    k_column: gl.constexpr
    runs: gl.tensor  # of 8 columns
    padded: gl.constexpr  # columns up to a power of two
    scaled: gl.constexpr  # "k" or "v", whose scales those of tokens are; None: there are none


@gluon.aggregate
class SpoiledTile:
    """Rows of a tile and their operands. Row number `first` + r is token number // group of query head
    head + number % group."""

    columns: gl.tuple  # of KeyColumns
    v: Strided
    out: Strided
    q_entry: gl.tensor  # batch entry of the queries
    out_entry: gl.tensor  # that of the output
    source: gl.base_value  # of keys, one of the classes of global_rows.py
    first: gl.tensor
    group: gl.tensor
    head: gl.tensor
    kv_head: gl.tensor
    lengths: gl.base_value  # with seq_q, seq_k
    sinks: gl.tensor
    runs_v: gl.tensor  # of 8 columns of a value
    padded_v: gl.constexpr
    writers: gl.constexpr  # number of warpgroups that wrote blocks of columns in turn
    block: gl.constexpr  # columns of a block
    writer: gl.tensor  # the one whose columns are written again
    lanes: gl.constexpr  # lanes of a row: more need fewer registers

    @gluon.jit
    def key_place(self, b, key, config: gl.constexpr, traits: gl.constexpr):
        """(batch entry or page, row in it) of a key."""
        if traits.paged:
            return self.source.table.page(key), key % config.page_size
        elif traits.kind == "ragged":
            return gl.to_tensor(0), self.source.start + key
        else:
            return b, key


@gluon.aggregate
class RowHeads:
    """What masks and scores read of rows, [G, 1]."""

    b: gl.tensor
    h: gl.tensor


@gluon.constexpr_function
def rows_at_once(x):
    """Rows of a tile that fit into registers with their output."""
    return min(32, HELD.value // max(x.padded_v, *[part.padded for part in x.columns]))


@gluon.constexpr_function
def rows_layout(lanes):
    """Registers of rows: runs of 8 columns, a row in `lanes` lanes of a warp."""
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [WARPS.value, 1], [1, 0])


@gluon.constexpr_function
def power_above(dim):
    """The power of two that holds a head dim."""
    return 1 << (dim - 1).bit_length()


@gluon.constexpr_function
def runs_of(dim):
    """Runs of 8 columns of a head, the last perhaps filled up."""
    return -(-dim // 8)


@gluon.jit
def addressed(x):
    """The array of `StridedRows`."""
    return Strided(x.pointer, x.outer, x.row, x.head, 8)


@gluon.jit
def attend_again(ctx, x, b, count):
    """The output of the rows of a tile that exist, of `count`; `x`: a `SpoiledTile`, `b`: number of the sequence."""
    at_once: gl.constexpr = rows_at_once(x)
    for first in range(0, gl.minimum(count, x.lengths.seq_q * x.group - x.first), at_once):
        attend_rows(ctx, x, b, x.first + first, at_once)


@gluon.jit
def attend_rows(ctx, x, b, first, count: gl.constexpr):
    """The output of `count` rows."""
    layout: gl.constexpr = rows_layout(x.lanes)
    config: gl.constexpr = ctx.config
    number = first + gl.arange(0, count, gl.SliceLayout(1, layout))[:, None]
    token = number // x.group
    rows = RowHeads(b, x.head + number - token * x.group)
    exists = token < x.lengths.seq_q
    q = load_queries(x, token, rows.h, exists, layout)
    ctx = gl.aggregate_replace(ctx, scale=rows_scale(ctx, x, token, rows))
    c = exponent_scale(ctx)
    m = gl.full([count, 1], -float("inf"), gl.float32, layout)
    l = gl.zeros_like(m)
    o = gl.zeros([count, x.padded_v], gl.float32, layout)
    for i in range(ctx.run.total):
        begin = ctx.run.key_tile(i) * config.BN
        for key in range(begin, gl.minimum(begin + config.BN, x.lengths.seq_k)):
            entry, row = x.key_place(b, key, config, ctx.traits)
            s = score(ctx, x, q, entry, row, layout)
            position = token + x.lengths.seq_k - x.lengths.seq_q
            if ctx.mods.score is not None:
                s = ctx.mods.apply_score(s, ctx.scale, rows, x.lengths, position, key)
            seen = ctx.mods.keeps(rows, x.lengths, position, key, key)
            s = gl.where(seen, s, -float("inf"))
            higher = gl.maximum(m, s)
            scale = row_scale(higher, c)
            alpha = gl.exp2(m * scale - exponent(higher, scale))
            p = gl.exp2(s * scale - exponent(higher, scale))
            value = load_row(x.v.at(entry, row, x.kv_head), x.runs_v, x.padded_v, layout)
            value *= token_scale(ctx, x, "v", entry, row, x.padded_v, layout)
            o = o * alpha
            o = gl.where(seen, o + p * value[None, :], o)
            l = l * alpha + p
            m = higher
    sink = 0.0
    if ctx.traits.has_sinks:
        sink = gl.load(x.sinks + rows.h, mask=exists, other=0.0)
    factor, _ = finish(ctx, m, l, sink, x.kv_head)
    col = gl.arange(0, x.padded_v, gl.SliceLayout(0, layout))[None, :]
    to = x.out.at(x.out_entry, token, rows.h) + col
    mine = (col < x.runs_v * 8) & (col // x.block % x.writers == x.writer)
    gl.store(to, (o * factor).to(x.out.pointer.dtype.element_ty), mask=exists & mine)


@gluon.jit
def load_queries(x, token, head, exists, layout: gl.constexpr):
    """The queries of rows, a tensor for each of the columns' parts; zeros for rows that are not there."""
    q = ()
    for i in gl.static_range(len(x.columns)):
        part = x.columns[i]
        col = gl.arange(0, part.padded, gl.SliceLayout(0, layout))[None, :]
        at = part.q.at(x.q_entry, token, head) + part.q_column + col
        q += (gl.load(at, mask=exists & (col < part.runs * 8), other=0.0),)
    return q


@gluon.jit
def score(ctx, x, q, entry, row, layout: gl.constexpr):
    """Products [G, 1] of rows with a key."""
    s = gl.zeros([q[0].shape[0]], gl.float32, gl.SliceLayout(1, layout))
    for i in gl.static_range(len(x.columns)):
        part = x.columns[i]
        k = load_row(part.k.at(entry, row, x.kv_head) + part.k_column, part.runs, part.padded, layout)
        if part.scaled is not None:
            k *= token_scale(ctx, x, part.scaled, entry, row, part.padded, layout)
        s += gl.sum(as_fp32(q[i]) * k[None, :], 1)
    return s[:, None]


@gluon.jit
def load_row(at, runs, padded: gl.constexpr, layout: gl.constexpr):
    """`runs` of 8 columns of a key or a value, fp32; zeros past them."""
    col = gl.arange(0, padded, gl.SliceLayout(0, layout))
    row = gl.load(at + col, mask=col < runs * 8, other=0.0)
    return as_fp32(row)


@gluon.jit
def as_fp32(x):
    """Elements of 16 or 8 bits."""
    if x.dtype.primitive_bitwidth == 8:
        x = x.to(gl.float16)
    return x.to(gl.float32)


@gluon.jit
def rows_scale(ctx, x, token, rows):
    """The softmax scale, of rows [G, 1] if they have one of their own, times those of 8-bit queries and keys."""
    config: gl.constexpr = ctx.config
    queries = None
    if has_scale(config, "q", "tensor", "head"):
        queries = head_scale(ctx.scales.q, rows.h)
    elif has_token_scale(config, "q"):
        shared: gl.constexpr = scaled_rows(config, "q")
        queries = block_scale(ctx.scales.q, rows.b, gl.minimum(token, x.lengths.seq_q - 1) // shared, rows.h)
    return scores_scale(ctx.scales, x.kv_head, ctx.mods, config, queries)


@gluon.jit
def token_scale(ctx, x, operand: gl.constexpr, entry, row, columns: gl.constexpr, layout: gl.constexpr):
    """The scale of a token's key or value, or those of its columns; 1 if tokens have none."""
    config: gl.constexpr = ctx.config
    if not has_token_scale(config, operand):
        return 1.0
    else:
        rows = ctx.scales.k if operand == "k" else ctx.scales.v
        to_row = gl.to_tensor(entry).to(gl.int64) * rows.outer + scale_row(config, operand, row) * rows.row
        at = rows.scale + to_row + x.kv_head * rows.head
        shared: gl.constexpr = config.eight_bit.columns(operand)
        if shared == 0:
            return gl.load(at)
        else:
            col = gl.arange(0, columns, gl.SliceLayout(0, layout))
            runs = x.runs_v if operand == "v" else x.columns[0].runs
            return gl.load(at + col // shared * rows.block, mask=col < runs * 8, other=1.0)
