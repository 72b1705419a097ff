"""The kernel that transposes values before a prefill with 8-bit products.

wgmma needs the summed index of 8-bit operands contiguous in memory, and P·V sums over keys. So this kernel writes a
head's values [keys, Dv] as [Dv, keys], every 32 keys in the order of weights.py, and 0 past the last key.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from warpattn.quantized import KEYS_OF_PRODUCT

from ....pieces.element_type import in_operand_order
from ...arguments import TRANSPOSED_KEYS

KEYS = gl.constexpr(TRANSPOSED_KEYS)  # keys of a program
BLOCK = gl.constexpr(KEYS_OF_PRODUCT)


@gluon.jit
def transpose_values_kernel(values, out_ptr, cu_ptr, shape, cols: gl.constexpr, ragged: gl.constexpr):
    """values: `StridedRows` of e4m3. out: (batch, heads, dim, places). cu: if `ragged`, int32 (sequences + 1,) row
    offsets of sequences packed end to end, and the batch is 1. shape: `TransposeShape`. One program per KEYS places of
    a head. A thread loads 16 bytes of each of four keys that are neighbours in the output."""
    lanes: gl.constexpr = cols // 16
    rows: gl.constexpr = gl.BlockedLayout([4, 16], [32 // lanes, lanes], [4, 1], [1, 0])
    columns: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    dim, places = 16 * shape.columns, BLOCK * shape.blocks  # so that the compiler knows the alignment of both
    tiles = gl.cdiv(places, KEYS)
    head = gl.program_id(0) // tiles
    tile = gl.program_id(0) - head * tiles
    b, h = head // shape.heads, head % shape.heads
    first, end = keys_of(tile, cu_ptr, shape, ragged)
    key = first + in_operand_order(gl.arange(0, KEYS, gl.SliceLayout(1, rows)))
    col = gl.arange(0, cols, gl.SliceLayout(0, rows))
    start = values.pointer + 16 * (b * (values.outer // 2) + h * (values.head // 2))
    inside = (key < end)[:, None] & (col < dim)[None, :]
    none = gl.zeros([KEYS, cols], gl.int8, rows).to(gl.float8e4nv, bitcast=True)
    x = gl.load(start + (key * (16 * (values.row // 2)))[:, None] + col[None, :], mask=inside, other=none)
    x = gl.convert_layout(x.permute((1, 0)), columns)
    row = gl.arange(0, cols, gl.SliceLayout(1, columns))
    place = tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, columns))
    at = (head.to(gl.int64) * dim + row) * places
    inside = (row < dim)[:, None] & (place < places)[None, :]
    gl.store(out_ptr + at[:, None] + place[None, :], x, mask=inside)


@gluon.jit
def keys_of(tile, cu_ptr, shape, ragged: gl.constexpr):
    """(first row, row after the last) of the keys that go to a tile of places. Each packed sequence begins with a new
    tile: sequence b with tile cu[b] // KEYS + b, which is never below the end of the sequence before."""
    if ragged:
        low = gl.to_tensor(0)
        high = gl.to_tensor(shape.batch)
        for _ in range(shape.halvings):
            middle = (low + high) // 2
            before = gl.load(cu_ptr + middle) // KEYS + middle <= tile
            low = gl.where(before, middle, low)
            high = gl.where(before, high, middle)
        start = gl.load(cu_ptr + low)
        return start + (tile - start // KEYS - low) * KEYS, gl.load(cu_ptr + low + 1)
    else:
        return tile * KEYS, shape.keys
