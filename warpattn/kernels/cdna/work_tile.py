"""The work of a workgroup: its tile of rows, the lengths of its sequence, and the addresses of its tensors.

      workgroup ──XCD──▶ number ──▶ (batch, key head) ──▶ query tile, longest first ──▶ query heads of the key head

Queries laid end to end start at row cu_q[b], such keys at cu_k[b]; paged ones are the first lengths[b] of the pages of
block_table[b].
The grid has as many workgroups for every sequence as the longest one needs; those past a sequence's last row exit.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.cdna3 import buffer_load

from ..amd.kv_buffer import KVSource, ScaleSource
from ..amd.xcd import tile_of_workgroup
from ..pieces.scheduler import Tile
from ..pieces.scheduler_varlen import extent_of, extent_within
from ..pieces.span import tile_span


@gluon.aggregate
class Tensors:
    """Tensors in DRAM."""

    q: gl.tensor
    k: gl.tensor
    v: gl.tensor
    o: gl.tensor
    lse: gl.tensor  # fp32
    sinks: gl.tensor  # fp32 (heads_q,)
    indices: gl.tuple  # () | RaggedIndices | PagedIndices | PagedRaggedIndices, see `config`
    strides: gl.tuple  # Strides
    q_rope: gl.tuple  # LatentArgs where rotary columns of queries are in a tensor of their own, else ()
    k_rope: gl.tuple  # the same of keys


@gluon.aggregate
class Lengths:
    seq_q: gl.tensor
    seq_k: gl.tensor


@gluon.aggregate
class WorkTile:
    """One workgroup's work: `rows.h` is the first query head, `rows.row` the first token."""

    rows: Tile
    lengths: Lengths
    q_start: gl.tensor  # int64 rows before this sequence
    k_start: gl.tensor  # int64 keys before it
    batch: gl.tensor  # index along the batch axis, 0 where there is none
    kv_head: gl.tensor


@gluon.jit
def two_tensors(x, own_rope: gl.constexpr):
    """(queries or keys without rotary columns, the `LatentArgs` with these); (x, ()) where all are in one tensor."""
    if own_rope:
        return x.latent, x
    else:
        return x, ()


@gluon.jit
def find_work(indices, shape, workgroup, config: gl.constexpr, traits: gl.constexpr):
    """The work of a workgroup, by its number."""
    number = tile_of_workgroup(workgroup, shape.tiles)
    packs = (shape.group + config.pack - 1) // config.pack
    stream = number // (shape.m_tiles * packs)
    rest = number - stream * shape.m_tiles * packs
    m = rest // packs
    b = stream // shape.heads_kv
    kv_head = stream - b * shape.heads_kv
    h = kv_head * shape.group + (rest - m * packs) * config.pack
    row = (shape.m_tiles - 1 - m) * (config.block_m // config.pack)
    return work_of(indices, shape, Tile(b, h, row), kv_head, traits)


@gluon.jit
def work_of(indices, shape, rows, kv_head, traits: gl.constexpr):
    """The work of a workgroup whose rows are known: where its sequence begins and ends."""
    b = rows.b
    q_start, k_start, seq_q, seq_k, batch = gl.to_tensor(0), gl.to_tensor(0), shape.seq_q, shape.seq_k, b
    if traits.ragged_queries:
        batch = gl.to_tensor(0)
    if traits.sequence == "ragged":
        q_start, seq_q = extent_of(indices.cu_q, b)
        k_start, seq_k = extent_of(indices.cu_k, b)
    elif traits.sequence == "paged-ragged":
        q_start, seq_q = extent_within(indices.cu_q, b, indices.batch)
        seq_k = gl.load(indices.lengths + b, mask=b < indices.batch, other=0)
    elif traits.sequence == "paged":
        seq_k = gl.load(indices.lengths + b)
    return WorkTile(rows, Lengths(seq_q, seq_k), q_start.to(gl.int64), k_start.to(gl.int64), batch, kv_head)


@gluon.jit
def keys_of(ctx, work):
    """The key tiles of a tile of rows: (their span, first, last of the partition's in it, end of the keys)."""
    keys = ctx.mods.key_span(work.rows, work.lengths, ctx.config.block_m // ctx.config.pack)
    span, end = tile_span(keys, ctx.config.block_n), gl.minimum(keys[3], work.lengths.seq_k)
    first, last = partition_of(ctx, gl.where(keys[0] < end, span.total, 0))
    return span, first, last, end


@gluon.jit
def partition_of(ctx, total):
    """(first, last) of the `total` tiles that rows see of which this workgroup visits its share."""
    if ctx.traits.partial:
        each = (total + ctx.shape.partitions - 1) // ctx.shape.partitions
        first = gl.minimum(gl.program_id(1) * each, total)
        return first, gl.minimum(first + each, total)
    else:
        return gl.to_tensor(0), total


@gluon.jit
def kv_sources(tensors, shape, work, scales, keys, config: gl.constexpr, traits: gl.constexpr):
    """(K, V, rotary columns of K or ()) of the work's key head, whose first `keys` keys its rows may see: what follows
    may hold NaN."""
    table = tensors.q.to(gl.pointer_type(gl.int32))
    if traits.paged:
        table = tensors.indices.block_table + work.rows.b.to(gl.int64) * shape.seq_k
    of_values = ()
    if config.v.scales > 0:
        of_values = scale_source(scales.v, work, traits)
    k = kv_source(tensors.k, tensors.strides.k, work, table, traits, keys, ())
    rope = ()
    if config.rope is not None:
        rope = kv_source(tensors.k_rope.rope, tensors.k_rope.rope_strides, work, table, traits, keys, ())
    return k, kv_source(tensors.v, tensors.strides.v, work, table, traits, keys, of_values), rope


@gluon.jit
def scale_source(rows, work, traits: gl.constexpr):
    """The scales in `ColumnScaleRows` of the work's key head."""
    base = rows.scale + work.kv_head * rows.head + work.k_start * rows.row
    if not traits.paged:
        base = base + work.batch * rows.outer
    return ScaleSource(base, rows.row, rows.outer, rows.block)


@gluon.jit
def elements(runs, bits: gl.constexpr = 16):
    """A stride in elements of so many bits, int64 and known to be a multiple of a run, from one in runs."""
    return runs.to(gl.int64) * (128 // bits)


@gluon.jit
def kv_source(base, strides, work, table, traits: gl.constexpr, keys, scales):
    """Keys or values with these `RowStrides`, the first `keys`, and what they are multiplied by on their way."""
    bits: gl.constexpr = base.dtype.element_ty.primitive_bitwidth
    outer = elements(strides.outer, bits)
    row = elements(strides.row, bits)
    base = base + work.kv_head.to(gl.int64) * elements(strides.head, bits) + work.k_start * row
    if not traits.paged:
        base = base + work.batch.to(gl.int64) * outer
    return KVSource(base, row, outer, table, keys, traits.page_size, scales)


@gluon.jit
def tile_rows(layout: gl.constexpr, config: gl.constexpr):
    """Numbers of a tile's rows; `layout` is that of a [M, N]."""
    return gl.arange(0, config.block_m, gl.SliceLayout(1, layout))


@gluon.jit
def rows_of(shape, work, r, config: gl.constexpr):
    """(token, query head, whether there is such a row) of rows `r` of a tile."""
    if config.pack == 1:
        token = work.rows.row + r
        return token, gl.full_like(r, 0) + work.rows.h, token < work.lengths.seq_q
    else:
        tokens: gl.constexpr = config.block_m // config.pack
        token = work.rows.row + r // config.pack
        head = work.rows.h + r % config.pack
        end = (work.kv_head + 1) * shape.group
        return token, head, (token < work.lengths.seq_q) & (r < tokens * config.pack) & (head < end)


@gluon.jit
def tile_offset(strides, work):
    """int64 elements from the first of q or o, with these `RowStrides`, to the tile's first."""
    row = work.q_start + work.rows.row.to(gl.int64)
    outer = work.batch.to(gl.int64) * elements(strides.outer)
    head = work.rows.h.to(gl.int64) * elements(strides.head)
    return outer + row * elements(strides.row) + head


@gluon.jit
def packed_offsets(strides, work, token, head):
    """int64 elements from the tile's first to the first of each of its rows, whose heads may be far apart."""
    rows = (token - work.rows.row).to(gl.int64) * elements(strides.row)
    return rows + (head - work.rows.h).to(gl.int64) * elements(strides.head)


@gluon.jit
def load_queries(tensors, shape, work, r, config: gl.constexpr, traits: gl.constexpr):
    """Rows `r` of Q [M, D] of the tile, in the layout that theirs is a slice of; zeros in rows and columns that do not
    exist."""
    layout: gl.constexpr = r.type.layout.parent
    token, head, inside = rows_of(shape, work, r, config)
    cols = gl.arange(0, config.padded_qk, gl.SliceLayout(0, layout))[None, :]
    mask = inside[:, None]
    if config.dim_qk < config.padded_qk:
        mask = mask & (cols < config.dim_qk)
    base = tensors.q + tile_offset(tensors.strides.q, work)
    if traits.own_rope:
        rope = tensors.q_rope.rope_strides
        latent = packed_offsets(tensors.strides.q, work, token, head)
        rotary = tile_offset(rope, work) + packed_offsets(rope, work, token, head) - config.dim_v
        at = gl.where(cols < config.dim_v, base + latent[:, None] + cols, tensors.q_rope.rope + rotary[:, None] + cols)
        return gl.load(at, mask=mask, other=0.0)
    elif config.pack == 1:
        return buffer_load(base, (r * (tensors.strides.q.row * 8))[:, None] + cols, mask=mask)
    else:
        at = packed_offsets(tensors.strides.q, work, token, head)
        return gl.load(base + at[:, None] + cols, mask=mask, other=0.0)


@gluon.jit
def score_rows(shape, work, r, config: gl.constexpr):
    """(tile with query heads [M, 1] or one, positions [M, 1]) of rows `r` of a tile for masks and scores."""
    token, head, _ = rows_of(shape, work, r, config)
    q = token[:, None] + work.lengths.seq_k - work.lengths.seq_q
    if config.pack == 1:
        return work.rows, q
    else:
        return Tile(work.rows.b, head[:, None], work.rows.row), q
