"""Where a workgroup works: its tile of rows, the lengths of its sequence, and where its tensors begin.

      workgroup ──XCD──▶ number ──▶ (batch, key head) ──▶ query tile, longest first ──▶ query heads of the key head

Ragged sequences start at row cu_q[b] and key cu_k[b]; paged ones have lengths[b] keys in the pages of block_table[b].
Workgroups past the last row of a sequence have nothing to do: the grid fits the longest one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.cdna3 import buffer_load

from ..amd.kv_buffer import KVSource
from ..amd.xcd import tile_of_workgroup
from ..pieces.scheduler import Tile
from .layouts import product_layout


@gluon.aggregate
class Tensors:
    """Tensors in DRAM; strides in units of 8 elements, int32: (batch or page, row, head) of q, k, v, o in turn."""

    q: gl.tensor
    k: gl.tensor
    v: gl.tensor
    o: gl.tensor
    lse: gl.tensor  # fp32; its strides, in elements, (batch, head) at the end of `strides`
    sinks: gl.tensor  # fp32 (heads_q,)
    indices: gl.tuple  # () | (cu_q, cu_k) | (block_table, lengths)
    strides: gl.tuple


@gluon.aggregate
class Shape:
    """Integers of a launch."""

    seq_q: gl.tensor  # dense: queries, else the most that a sequence has
    seq_k: gl.tensor  # dense: keys; paged: entries of a row of the block table
    heads_kv: gl.tensor
    group: gl.tensor  # query heads per key head
    m_tiles: gl.tensor  # query tiles of the longest sequence
    tiles: gl.tensor  # workgroups
    partitions: gl.tensor


@gluon.aggregate
class Lengths:
    seq_q: gl.tensor
    seq_k: gl.tensor


@gluon.aggregate
class Place:
    """One workgroup's work: `rows.h` is the first query head, `rows.row` the first token."""

    rows: Tile
    lengths: Lengths
    q_start: gl.tensor  # int64 rows before this sequence
    k_start: gl.tensor  # int64 keys before it
    batch: gl.tensor  # index along the batch axis, 0 where there is none
    kv_head: gl.tensor


@gluon.jit
def find_place(tensors, shape, config: gl.constexpr, traits: gl.constexpr):
    """The work of this workgroup."""
    number = tile_of_workgroup(gl.program_id(0), shape.tiles)
    packs = (shape.group + config.pack - 1) // config.pack
    stream = number // (shape.m_tiles * packs)
    rest = number - stream * shape.m_tiles * packs
    m = rest // packs
    b = stream // shape.heads_kv
    kv_head = stream - b * shape.heads_kv
    h = kv_head * shape.group + (rest - m * packs) * config.pack
    row = (shape.m_tiles - 1 - m) * (config.block_m // config.pack)
    rows = Tile(b, h, row)
    none = gl.to_tensor(0).to(gl.int64)
    if traits.sequence == "ragged":
        q_start = gl.load(tensors.indices[0] + b)
        k_start = gl.load(tensors.indices[1] + b)
        seq_q = gl.load(tensors.indices[0] + b + 1) - q_start
        seq_k = gl.load(tensors.indices[1] + b + 1) - k_start
        lengths = Lengths(seq_q, seq_k)
        return Place(rows, lengths, q_start.to(gl.int64), k_start.to(gl.int64), gl.to_tensor(0), kv_head)
    elif traits.sequence == "paged":
        return Place(rows, Lengths(shape.seq_q, gl.load(tensors.indices[1] + b)), none, none, b, kv_head)
    else:
        return Place(rows, Lengths(shape.seq_q, shape.seq_k), none, none, b, kv_head)


@gluon.jit
def kv_sources(tensors, shape, place, traits: gl.constexpr):
    """(K, V) of the work's key head."""
    table = tensors.q.to(gl.pointer_type(gl.int32))
    if traits.sequence == "paged":
        table = tensors.indices[0] + place.rows.b.to(gl.int64) * shape.seq_k
    k = kv_source(tensors.k, tensors.strides, 3, place, table, traits)
    return k, kv_source(tensors.v, tensors.strides, 6, place, table, traits)


@gluon.jit
def stride(strides, at: gl.constexpr):
    """Stride number `at` in elements, int64 and known to be a multiple of 8."""
    return strides[at].to(gl.int64) * 8


@gluon.jit
def kv_source(base, strides, at: gl.constexpr, place, table, traits: gl.constexpr):
    """Keys or values, whose three strides begin at number `at`."""
    outer = stride(strides, at)
    row = stride(strides, at + 1)
    base = base + place.kv_head.to(gl.int64) * stride(strides, at + 2) + place.k_start * row
    if traits.sequence != "paged":
        base = base + place.batch.to(gl.int64) * outer
    return KVSource(base, row, outer, table, place.lengths.seq_k, traits.page_size)


@gluon.jit
def tile_rows(layout: gl.constexpr, config: gl.constexpr):
    """Numbers of a tile's rows; `layout` is that of a [M, N]."""
    return gl.arange(0, config.block_m, gl.SliceLayout(1, layout))


@gluon.jit
def row_places(shape, place, r, config: gl.constexpr):
    """(token, query head, whether there is such a row) of rows `r` of a tile."""
    if config.pack == 1:
        token = place.rows.row + r
        return token, gl.full_like(r, 0) + place.rows.h, token < place.lengths.seq_q
    else:
        tokens: gl.constexpr = config.block_m // config.pack
        token = place.rows.row + r // config.pack
        head = place.rows.h + r % config.pack
        end = (place.kv_head + 1) * shape.group
        return token, head, (token < place.lengths.seq_q) & (r < tokens * config.pack) & (head < end)


@gluon.jit
def first_place(tensors, place, at: gl.constexpr):
    """int64 elements from the first of q (at 0) or o (at 9) to the tile's first."""
    row = place.q_start + place.rows.row.to(gl.int64)
    outer = place.batch.to(gl.int64) * stride(tensors.strides, at)
    head = place.rows.h.to(gl.int64) * stride(tensors.strides, at + 2)
    return outer + row * stride(tensors.strides, at + 1) + head


@gluon.jit
def packed_offsets(tensors, place, token, head, at: gl.constexpr):
    """int64 elements from the tile's first to those of its rows, whose heads may be far apart."""
    rows = (token - place.rows.row).to(gl.int64) * stride(tensors.strides, at + 1)
    return rows + (head - place.rows.h).to(gl.int64) * stride(tensors.strides, at + 2)


@gluon.jit
def load_queries(tensors, shape, place, layout: gl.constexpr, config: gl.constexpr):
    """Q [M, D] of the tile as an operand; zeros where there is none."""
    r = tile_rows(layout, config)
    token, head, inside = row_places(shape, place, r, config)
    cols = gl.arange(0, config.padded_qk, gl.SliceLayout(0, layout))[None, :]
    mask = inside[:, None]
    if config.dim_qk < config.padded_qk:
        mask = mask & (cols < config.dim_qk)
    base = tensors.q + first_place(tensors, place, 0)
    if config.pack == 1:
        return buffer_load(base, (r * (tensors.strides[1] * 8))[:, None] + cols, mask=mask)
    else:
        at = packed_offsets(tensors, place, token, head, 0)
        return gl.load(base + at[:, None] + cols, mask=mask, other=0.0)


@gluon.jit
def element_rows(shape, place, config: gl.constexpr):
    """(tile with query heads [M, 1] or one, positions [M, 1]) of the scores' rows for masks and scores."""
    layout: gl.constexpr = product_layout(config)
    token, head, _ = row_places(shape, place, tile_rows(layout, config), config)
    q = token[:, None] + place.lengths.seq_k - place.lengths.seq_q
    if config.pack == 1:
        return place.rows, q
    else:
        return Tile(place.rows.b, head[:, None], place.rows.row), q
