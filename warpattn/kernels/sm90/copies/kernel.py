"""The kernel that runs before prefill on Hopper and copies K and V, once, to 16 bits and whole key tiles.

Prefill reads each key once for every query tile. Each time it would convert 8-bit keys (prefill/eight_bit/convert.py)
or load a small page with a TMA box of its own, so where many rows see each key, copying first takes less time. fp16 and
bf16 hold e4m3 and e5m2 exactly; prefill applies scales of a tensor or head later, in fp32. Scales of tokens are
multiplied into bf16 copies, whose range they fit; this rounds each element once.

      pages, or rows of sequences  ──▶  [ places of 128 keys, head, 128, dim ]        one program per place and head
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from warpattn.problem.memory import COPIED_KEYS

KEYS = gl.constexpr(COPIED_KEYS)  # keys of a program
RUN = gl.constexpr(8)  # elements of a load
WARPS = gl.constexpr(4)


@gluon.aggregate
class Place:
    """The keys of a program: `first` to `end`, at most KEYS, of a head of sequence `b`; `row`: the first one's copy."""

    b: gl.tensor
    head: gl.tensor
    first: gl.tensor
    end: gl.tensor
    row: gl.tensor


@gluon.jit
def copy_kernel(k, v, k_out, v_out, index, shape, k_kind: gl.constexpr, v_kind: gl.constexpr):
    """Copies K and V. k, v: `CopySource`. k_out, v_out: 16 bits, (batch, heads, keys, dim), or with pages (places,
    heads, KEYS, dim). index: `CopyIndex`. shape: `CopyShape`. k_kind, v_kind: `CopiedRows`. Grid: (places of all
    sequences, key heads, 2: K and V)."""
    number, head = gl.program_id(0), gl.program_id(1)
    b = number // shape.places
    first = (number - b * shape.places) * KEYS
    end = keys_of(b, index, shape, k_kind.paged)
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
def keys_of(b, index, shape, paged: gl.constexpr):
    """Number of keys of sequence `b`."""
    if paged:
        return gl.minimum(gl.load(index.lengths + b), shape.keys)
    else:
        return shape.keys


@gluon.jit
def copy_rows(source, out, place, index, shape, runs, kind: gl.constexpr):
    """Copies the rows of a place, RUN * `runs` columns each, to `out` and its dtype, times the scales of tokens."""
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
    """Loads 16-bit elements, or 8-bit ones as fp16; 0 where not `inside`."""
    stored: gl.constexpr = places.dtype.element_ty
    if stored.primitive_bitwidth == 8:
        none = gl.zeros(shape, gl.int8, layout).to(stored, bitcast=True)
        return gl.load(places, mask=inside, other=none).to(gl.float16)
    else:
        return gl.load(places, mask=inside, other=0.0)


@gluon.jit
def factors(scale, outer, row, head, step: gl.constexpr, there, kind: gl.constexpr):
    """Loads the tokens' scales [KEYS] for block number `step` of columns."""
    at = outer.to(gl.int64) * scale.outer + (row // kind.shared).to(gl.int64) * scale.row + head * scale.head
    if kind.columns > 0:
        at += step * scale.block
    return gl.load(scale.scale + at, mask=there, other=0.0)


@gluon.jit
def source_of(b, key, there, index, shape, paged: gl.constexpr):
    """(batch entry or page, row) of `key` [KEYS] of sequence `b`; page numbers are read only where `there`."""
    if paged:
        entry = index.table + b.to(gl.int64) * index.table_stride + key // shape.page_size
        page = gl.load(entry, mask=there, other=0)
        return gl.minimum(gl.maximum(page, 0), shape.pages - 1), key % shape.page_size
    else:
        return b + 0 * key, key
