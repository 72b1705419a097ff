"""What a workgroup of the backward works on: its rows, tiles of the other side, and numbers of each query row."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.cdna3 import buffer_load, buffer_store

from ...amd.kv_buffer import KVSource
from ...amd.xcd import tile_of_workgroup
from ...pieces.modifiers import Modifiers
from ...pieces.scheduler import Tile
from ..layouts import product_layout, scores_operand
from ..work_tile import elements, work_of
from . import config as sizes

HELD = gl.constexpr(sizes.HELD)


@gluon.aggregate
class Context:
    """What every step of a workgroup reads."""

    reads: gl.tuple  # `Reads`
    strides: gl.tuple  # `ReadStrides`
    numbers: gl.tuple  # `RowNumbers`
    shape: gl.tuple  # `BackwardShape`
    mods: Modifiers  # without its `keep`: see `keeps`
    slope: gl.constexpr  # derivative of the score function, or None: 1
    scale: gl.tensor
    keeps: gl.tuple  # the mask's conditions, see `signature.keep_functions`
    config: gl.constexpr
    traits: gl.constexpr


@gluon.aggregate
class Rows:
    """Rows of one head of a tensor, for `load_held` and `store_held`."""

    head: gl.tensor
    start: gl.tensor  # int64 rows before the sequence
    batch: gl.tensor
    first: gl.tensor  # of the sequence's rows
    length: gl.tensor  # of the sequence


@gluon.jit
def find_keys(indices, shape, traits: gl.constexpr):
    """(work of this workgroup, its first key): the first keys of a head, which most rows of a causal mask see, first.
    The work's rows are the first query head's."""
    number = tile_of_workgroup(gl.program_id(0), shape.tiles)
    stream = number // shape.m_tiles
    b = stream // shape.heads_kv
    kv_head = stream - b * shape.heads_kv
    rows = Tile(b, kv_head * shape.group, gl.to_tensor(0))
    return work_of(indices, shape, rows, kv_head, traits), (number - stream * shape.m_tiles) * HELD


@gluon.jit
def query_rows(work, head, first):
    """Rows of q, out or dout from query `first` on."""
    return Rows(head, work.q_start, work.batch, first, work.lengths.seq_q)


@gluon.jit
def key_rows(work, first):
    """Rows of k or v from key `first` on."""
    return Rows(work.kv_head, work.k_start, work.batch, first, work.lengths.seq_k)


@gluon.jit
def place(base, strides, rows, first):
    """Pointer to row `first` of a head."""
    base += rows.batch.to(gl.int64) * elements(strides.outer) + rows.head.to(gl.int64) * elements(strides.head)
    return base + (rows.start + first) * elements(strides.row)


@gluon.jit
def row_offsets(strides, rows, dim: gl.constexpr, padded: gl.constexpr, layout: gl.constexpr):
    """(offsets from the first of HELD rows [HELD, padded], which of them exist)."""
    r = gl.arange(0, HELD, gl.SliceLayout(1, layout))
    cols = gl.arange(0, padded, gl.SliceLayout(0, layout))[None, :]
    inside = (rows.first + r < rows.length)[:, None]
    if dim < padded:
        inside = inside & (cols < dim)
    return (r * (strides.row * 8))[:, None] + cols, inside


@gluon.jit
def load_held(base, strides, rows, dim: gl.constexpr, padded: gl.constexpr, config: gl.constexpr):
    """HELD rows [HELD, padded] as the left operand of S or dP; zeros in what does not exist."""
    offsets, inside = row_offsets(strides, rows, dim, padded, scores_operand(config, 0))
    return buffer_load(place(base, strides, rows, rows.first), offsets, mask=inside)


@gluon.jit
def store_held(base, strides, rows, x, dim: gl.constexpr, config: gl.constexpr):
    """Write HELD rows [HELD, padded]."""
    offsets, inside = row_offsets(strides, rows, dim, x.shape[1], product_layout(config))
    buffer_store(x.to(base.dtype.element_ty), place(base, strides, rows, rows.first), offsets, mask=inside)


@gluon.jit
def source(base, strides, rows):
    """The rows of a head as what is walked."""
    first = place(base, strides, rows, 0)
    row = elements(strides.row)
    return KVSource(first, row, row, first.to(gl.pointer_type(gl.int32)), rows.length, 0, ())


@gluon.jit
def numbers_start(ctx, work, head):
    """Where the numbers of a head's rows begin in `RowNumbers`; a multiple of HELD."""
    if ctx.traits.ragged_queries:
        block = (work.q_start.to(gl.int32) + work.rows.b * HELD) // HELD
        return (head.to(gl.int64) * ctx.shape.blocks + block) * HELD
    else:
        return (work.batch.to(gl.int64) * ctx.shape.heads_q + head) * ctx.shape.blocks * HELD


@gluon.jit
def statistics_start(ctx, work):
    """Where the LSE of the work's rows begins among those of all heads."""
    if ctx.traits.ragged_queries:
        return work.rows.h.to(gl.int64) * ctx.shape.seq_q + work.q_start + work.rows.row
    else:
        return (work.batch.to(gl.int64) * ctx.shape.heads_q + work.rows.h) * ctx.shape.seq_q + work.rows.row
