"""Before prefill on Hopper: copies of keys and values in 16 bits and in whole tiles, each made once.

Prefill reads each key again for every tile of queries: 8 bits would be converted every time (prefill/eight_bit/
convert.py), and pages of few keys take as many boxes of TMA. Where many rows see each key, making copies and reading
them takes less time. e4m3 and e5m2 are exact in fp16 and in bf16, and scales of a tensor or head are multiplied in
later, in fp32. Those of tokens go into copies of bf16, whose range they fit, and round each element once.

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
    k, v, k_out, v_out, index, shape, k_kind: gl.constexpr, v_kind: gl.constexpr, ragged: gl.constexpr
):  # fmt: skip
    """k, v: `CopySource`. k_out, v_out: of 16 bits, (batch, heads, keys, dim), or (places, heads, KEYS, dim) of pages.
    index: `CopyIndex`. shape: `CopyShape`. k_kind, v_kind: `CopiedRows`. ragged: sequences have differently many
    queries. Grid: (places of all sequences, key heads, keys and values)."""
    number, head = gl.program_id(0), gl.program_id(1)
    b = number // shape.places
    first = (number - b * shape.places) * KEYS
    end = keys_of(b, index, shape, k_kind.paged, ragged)
    if k_kind.paged:
        row = (number.to(gl.int64) * shape.heads + head) * KEYS
        if (head == 0) & (gl.program_id(2) == 0):
            gl.store(index.out_table + number, number)
    else:
        row = (b.to(gl.int64) * shape.heads + head) * shape.keys + first
    place = Place(b, head, first, end, row)
    if first < end:
        if gl.program_id(2) == 0:
            copy_rows(k, k_out, place, index, shape, shape.k_runs, k_kind)
        else:
            copy_rows(v, v_out, place, index, shape, shape.v_runs, v_kind)


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
def copy_rows(source, out, place, index, shape, runs, kind: gl.constexpr):
    """The rows of a place, RUN * `runs` columns each, in the dtype of `out`, times the factors of their tokens."""
    width: gl.constexpr = kind.width
    lanes: gl.constexpr = min(width // RUN, 32)
    layout: gl.constexpr = gl.BlockedLayout([1, RUN], [32 // lanes, lanes], [WARPS, 1], [1, 0])
    number = gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    key = place.first + number
    there = key < place.end
    outer, row = source_of(place.b, key, there, index, shape, kind.paged)
    rows = source.rows
    at = outer.to(gl.int64) * rows.outer + row.to(gl.int64) * rows.row + place.head.to(gl.int64) * rows.head
    for step in gl.static_range(kind.cols // width):
        col = step * width + gl.arange(0, width, gl.SliceLayout(0, layout))[None, :]
        inside = there[:, None] & (col < runs * RUN)
        x = loaded(rows.pointer + (at * RUN)[:, None] + col, inside, [KEYS, width], layout)
        if kind.scaled:
            factor = factors(source.scale, outer, row, place.head, step, there & (step * width < runs * RUN), kind)
            x = x.to(gl.float32) * factor[:, None]
        to = ((place.row + number) * (runs * RUN))[:, None] + col
        gl.store(out + to, x.to(gl.float32).to(out.dtype.element_ty), mask=inside)


@gluon.jit
def loaded(places, inside, shape: gl.constexpr, layout: gl.constexpr):
    """Elements of 16 bits, or fp16 of 8 bits; 0 outside."""
    stored: gl.constexpr = places.dtype.element_ty
    if stored.primitive_bitwidth == 8:
        none = gl.zeros(shape, gl.int8, layout).to(stored, bitcast=True)
        return gl.load(places, mask=inside, other=none).to(gl.float16)
    else:
        return gl.load(places, mask=inside, other=0.0)


@gluon.jit
def factors(scale, outer, row, head, step: gl.constexpr, there, kind: gl.constexpr):
    """Factors [KEYS] of the tokens' block number `step` of columns."""
    at = outer.to(gl.int64) * scale.outer + (row // kind.shared).to(gl.int64) * scale.row + head * scale.head
    if kind.columns > 0:
        at += step * scale.block
    return gl.load(scale.scale + at, mask=there, other=0.0)


@gluon.jit
def source_of(b, key, there, index, shape, paged: gl.constexpr):
    """(batch entry or page, row) of keys [KEYS] of sequence `b`, read where they are `there`."""
    if paged:
        entry = index.table + b.to(gl.int64) * index.table_stride + key // shape.page_size
        page = gl.load(entry, mask=there, other=0)
        return gl.minimum(gl.maximum(page, 0), shape.pages - 1), key % shape.page_size
    else:
        return b + 0 * key, key
