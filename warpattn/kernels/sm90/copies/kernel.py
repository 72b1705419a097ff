"""Before prefill on Hopper: copies of keys and values in 16 bits and in whole tiles, each made once.

Prefill reads each key again for every tile of queries: 8 bits would be converted every time (prefill/eight_bit/
convert.py), and pages of few keys take as many boxes of TMA. Where many rows see each key, making copies and reading
them takes less time. e4m3 and e5m2 are exact in fp16 and in bf16; scales are multiplied in later, in fp32.

      pages, or rows of sequences  ──▶  [ places of 128 keys, head, 128, dim ]        one program: a head of a place
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..arguments import COPIED_KEYS

KEYS = gl.constexpr(COPIED_KEYS)  # of a program
RUN = gl.constexpr(8)  # elements of a load
WARPS = gl.constexpr(4)


@gluon.aggregate
class Place:
    """Keys `first` to `end`, KEYS at most, of a head of sequence `b`; `row` has the first one's copy."""

    b: gl.tensor
    head: gl.tensor
    first: gl.tensor
    end: gl.tensor
    row: gl.tensor


@gluon.jit
def copy_kernel(
    k, v, k_out, v_out, index, shape,
    k_cols: gl.constexpr, v_cols: gl.constexpr, paged: gl.constexpr, ragged: gl.constexpr,
):  # fmt: skip
    """k, v: `StridedRows`. k_out, v_out: of 16 bits, (batch, heads, keys, dim), or (places, heads, KEYS, dim)
    if `paged`. index: `CopyIndex`. shape: `CopyShape`. k_cols, v_cols: powers of two from the head dims on. ragged:
    sequences have differently many queries. Grid: (places of all sequences, key heads, keys and values)."""
    number, head = gl.program_id(0), gl.program_id(1)
    b = number // shape.places
    first = (number - b * shape.places) * KEYS
    end = keys_of(b, index, shape, paged, ragged)
    if paged:
        row = (number.to(gl.int64) * shape.heads + head) * KEYS
        if (head == 0) & (gl.program_id(2) == 0):
            gl.store(index.out_table + number, number)
    else:
        row = (b.to(gl.int64) * shape.heads + head) * shape.keys + first
    place = Place(b, head, first, end, row)
    if first < end:
        if gl.program_id(2) == 0:
            copy_rows(k, k_out, place, index, shape, shape.k_runs, k_cols, paged)
        else:
            copy_rows(v, v_out, place, index, shape, shape.v_runs, v_cols, paged)


@gluon.jit
def keys_of(b, index, shape, paged: gl.constexpr, ragged: gl.constexpr):
    """Keys of sequence `b`, 0 where it has too few queries for prefill."""
    keys = shape.keys
    if paged:
        keys = gl.minimum(gl.load(index.lengths + b), keys)
    if ragged:
        queries = gl.load(index.cu_q + b + 1) - gl.load(index.cu_q + b)
        keys = gl.where(queries >= shape.least_q, keys, 0)
    return keys


@gluon.jit
def copy_rows(rows, out, place, index, shape, runs, cols: gl.constexpr, paged: gl.constexpr):
    """The `rows` of a place, RUN * `runs` columns each, in the dtype of `out`."""
    lanes: gl.constexpr = min(cols // RUN, 32)
    layout: gl.constexpr = gl.BlockedLayout([1, RUN], [32 // lanes, lanes], [WARPS, 1], [1, 0])
    number = gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    col = gl.arange(0, cols, gl.SliceLayout(0, layout))[None, :]
    key = place.first + number
    there = key < place.end
    outer, row = source_of(place.b, key, there, index, shape, paged)
    at = outer.to(gl.int64) * rows.outer + row.to(gl.int64) * rows.row + place.head.to(gl.int64) * rows.head
    inside = there[:, None] & (col < runs * RUN)
    stored: gl.constexpr = rows.pointer.dtype.element_ty
    places = rows.pointer + (at * RUN)[:, None] + col
    if stored.primitive_bitwidth == 8:
        none = gl.zeros([KEYS, cols], gl.int8, layout).to(stored, bitcast=True)
        x = gl.load(places, mask=inside, other=none).to(gl.float16)
        if out.dtype.element_ty == gl.bfloat16:
            x = x.to(gl.float32).to(gl.bfloat16)
    else:
        x = gl.load(places, mask=inside, other=0.0)
    gl.store(out + ((place.row + number) * (runs * RUN))[:, None] + col, x, mask=inside)


@gluon.jit
def source_of(b, key, there, index, shape, paged: gl.constexpr):
    """(batch entry or page, row) of keys [KEYS] of sequence `b`, read where they are `there`."""
    if paged:
        entry = index.table + b.to(gl.int64) * index.table_stride + key // shape.page_size
        page = gl.load(entry, mask=there, other=0)
        return gl.minimum(gl.maximum(page, 0), shape.pages - 1), key % shape.page_size
    else:
        return b + 0 * key, key
