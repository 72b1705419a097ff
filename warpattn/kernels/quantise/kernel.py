"""Makes 8-bit values and their scales of tensors (sequence, token, head, dim): value = x / scale, rounded to nearest.

      scale given             one launch    read x, write values
      per token               one launch    read x, write scales and values: a row stays in registers
      per tensor, per head    two           sizes: maxima of parts of x; values: scales of these, read x, write values

With `transposed` the launch that writes values writes them transposed as well (`quantized.transposed_values`).

A program has a tile of rows of one head, or where a scale is made of all, every n-th. The second launch visits tiles
from the last to the first, so that it finds in L2 what the first one has read last.

The quotient is that of a division rounded to nearest, so it has the bits of torch's, without its instructions: the
product with the rounded reciprocal, corrected by its own remainder, which is exact. Scales near the ends of fp32 are
moved to its middle first, so that neither of them leaves the normal numbers. Issuing instructions takes as long as
memory does here: 23 for an element were 0.6 of a copy's bytes/s (H200, 2026-11-23).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import PropagateNan

from warpattn.kernels.cache.config import VECTOR
from warpattn.quantized import KEYS_OF_PRODUCT

from ..pieces.element_type import in_operand_order

_LEAST_SCALE = gl.constexpr(2.0**-126)
_ALL = gl.constexpr(PropagateNan.ALL)
_KEYS = gl.constexpr(KEYS_OF_PRODUCT)


@gluon.aggregate
class Tiles:
    """The tiles of this program's head, and its share of them."""

    head: gl.tensor
    part: gl.tensor
    blocks: gl.tensor  # tiles of the head
    shape: gl.tuple  # QuantiseShape

    @gluon.jit
    def there(self, block, config: gl.constexpr, layout: gl.constexpr):
        """Whether tile number `block` has each of its rows."""
        if config.transposed:
            _, token = self.tokens(block, config, layout)
            return token < self.shape.tokens
        else:
            row = gl.arange(0, config.rows, gl.SliceLayout(1, layout))
            return row < self.shape.count - block * config.rows

    @gluon.jit
    def tokens(self, block, config: gl.constexpr, layout: gl.constexpr):
        """(sequence, tokens) of tile number `block`, where a row is a place of `quantized.transposed_values`."""
        b, first = self.places(block, config)
        place = first + gl.arange(0, config.rows, gl.SliceLayout(1, layout))
        return b, in_operand_order(place)

    @gluon.jit
    def places(self, block, config: gl.constexpr):
        """(sequence, first place) of tile number `block`."""
        of_sequence = gl.cdiv(self.shape.tokens, config.rows)
        b = block // of_sequence
        return b, (block - b * of_sequence) * config.rows

    @gluon.jit
    def starts(self, rows, block, run: gl.constexpr, config: gl.constexpr, layout: gl.constexpr):
        """Where the rows of tile number `block` start in a `Rows`, whose strides count runs."""
        row = gl.arange(0, config.rows, gl.SliceLayout(1, layout))
        of_head = rows.pointer + self.head.to(gl.int64) * rows.head * run
        if config.transposed:
            b, token = self.tokens(block, config, layout)
            return of_head + b.to(gl.int64) * rows.outer * run + token.to(gl.int64) * rows.row * run
        elif config.sequences:
            number = block * config.rows + row
            b = number // self.shape.tokens
            token = number - b * self.shape.tokens
            return of_head + (b.to(gl.int64) * rows.outer + token.to(gl.int64) * rows.row) * run
        else:
            first = of_head + (block * config.rows).to(gl.int64) * rows.row * run
            return first + row.to(gl.int64) * rows.row * run


@gluon.jit
def tiles_of(shape, config: gl.constexpr):
    """Those of this program."""
    part = gl.program_id(0) // shape.heads
    if config.transposed:
        blocks = gl.cdiv(shape.tokens, config.rows) * (shape.count // shape.tokens)
    else:
        blocks = gl.cdiv(shape.count, config.rows)
    return Tiles(gl.program_id(0) - part * shape.heads, part, blocks, shape)


@gluon.constexpr_function
def tile_layout(config, size, lanes):
    """Registers of a tile [rows, width] of elements of `size` bytes: two loads of 16 bytes a row, so that a thread has
    few rows, whose scales cost a division or two each. `transposed`: four rows, neighbours where they are written."""
    vector = min(config.width, (1 if config.transposed else 2) * VECTOR // size)
    across = min(config.width // vector, 32)
    return gl.BlockedLayout([4 if config.transposed else 1, vector], [lanes // across, across], [4, 1], [1, 0])


@gluon.constexpr_function
def across_layout(config, lanes):
    """Registers of a transposed tile [width, rows] of bytes."""
    runs = config.rows // VECTOR
    return gl.BlockedLayout([1, VECTOR], [lanes // runs, runs], [4, 1], [1, 0])


@gluon.jit
def sizes_kernel(x, sizes_ptr, shape, config: gl.constexpr, lanes: gl.constexpr):
    """x: `Rows`. sizes: float* (heads, parts), the largest finite magnitude of each part of a head. Grid: parts of all
    heads."""
    layout: gl.constexpr = tile_layout(config, x.pointer.dtype.element_ty.primitive_bitwidth // 8, lanes)
    tiles = tiles_of(shape, config)
    vector: gl.constexpr = layout.size_per_thread[1]
    pieces: gl.constexpr = [config.rows, config.width // vector, vector]
    top = gl.max(gl.zeros([config.rows, config.width], gl.float32, layout).reshape(pieces), 2)  # one of a thread a row
    for i in range(tiles.part, tiles.blocks, shape.parts):
        size = magnitudes(load_rows(x, tiles, i, config, layout)).reshape(pieces)
        top = gl.maximum(top, gl.max(size, 2))
    gl.store(sizes_ptr + tiles.head * shape.parts + tiles.part, gl.max(gl.max(top, 1), 0))


@gluon.jit
def values_kernel(x, values, across_ptr, scale, sizes_ptr, shape, config: gl.constexpr, lanes: gl.constexpr):
    """x, values: `Rows`; across: values (sequence, head, dim, place) if `transposed`; scale: `Rows` of fp32, read if it
    is given, else written. sizes: what `sizes_kernel` left, where a tensor's or a head's scale is made of them. Grid:
    parts of all heads."""
    layout: gl.constexpr = tile_layout(config, x.pointer.dtype.element_ty.primitive_bitwidth // 8, lanes)
    tiles = tiles_of(shape, config)
    size = gl.full([config.rows], 1.0, gl.float32, gl.SliceLayout(1, layout))
    if config.per != "token":
        size = size * scale_of_head(scale, sizes_ptr, tiles, config, lanes)
    if config.sizes > 0:
        for i in range(tiles.part, tiles.blocks, shape.parts):
            made = make_tile(x, values, scale, size, tiles, tiles.blocks - 1 - i, config, layout)
            store_across(across_ptr, made, tiles, tiles.blocks - 1 - i, config, lanes)
    else:
        made = make_tile(x, values, scale, size, tiles, tiles.part, config, layout)
        store_across(across_ptr, made, tiles, tiles.part, config, lanes)


@gluon.jit
def make_tile(x, values, scale, size, tiles, block, config: gl.constexpr, layout: gl.constexpr):
    """Writes and returns tile number `block` of a head. size: scales [M] of its rows, unless tokens have their own."""
    rows = load_rows(x, tiles, block, config, layout)
    if config.per == "token":
        at, there = tiles.starts(scale, block, 1, config, layout), tiles.there(block, config, layout)
        if config.given:
            size = gl.load(at, mask=there, other=1.0)
        else:
            size = scale_of(gl.max(magnitudes(rows), 1), config)
            gl.store(at, size, mask=there)
    made = quotients(rows, size, config.largest).to(values.pointer.dtype.element_ty)
    at = tiles.starts(values, block, config.stored_run, config, layout)[:, None] + columns(config, layout)
    gl.store(at, made, mask=inside(tiles, block, config, layout))
    return made


@gluon.jit
def store_across(across_ptr, made, tiles, block, config: gl.constexpr, lanes: gl.constexpr):
    """Writes tile number `block` transposed, if it is to be."""
    if config.transposed:
        layout: gl.constexpr = across_layout(config, lanes)
        b, first = tiles.places(block, config)
        places = _KEYS * gl.cdiv(tiles.shape.tokens, _KEYS)  # so that the compiler knows its alignment
        place = first + gl.arange(0, config.rows, gl.SliceLayout(0, layout))
        col = gl.arange(0, config.width, gl.SliceLayout(1, layout))
        at = ((b.to(gl.int64) * tiles.shape.heads + tiles.head) * config.dim + col) * places
        there = (col < config.dim)[:, None] & (place < places)[None, :]
        made = gl.convert_layout(made.permute((1, 0)), layout)
        gl.store(across_ptr + at[:, None] + place[None, :], made, mask=there)


@gluon.jit
def scale_of_head(scale, sizes_ptr, tiles, config: gl.constexpr, lanes: gl.constexpr):
    """The scale of this program's head, or of the tensor; one program writes what is made here."""
    shape = tiles.shape
    if config.given:
        return gl.load(scale.pointer + tiles.head * scale.head)
    else:
        layout: gl.constexpr = gl.BlockedLayout([max(1, config.sizes // (4 * lanes))], [lanes], [4], [0])
        number = gl.arange(0, config.sizes, layout)
        of_head: gl.constexpr = config.per == "head"
        first = tiles.head * shape.parts if of_head else 0
        count = shape.parts if of_head else shape.parts * shape.heads
        size = scale_of(gl.max(gl.load(sizes_ptr + first + number, mask=number < count, other=0.0), 0), config)
        writes = (tiles.part == 0) & (of_head | (tiles.head == 0))
        gl.store(scale.pointer + tiles.head * scale.head, size, mask=writes)
        return size


@gluon.jit
def load_rows(x, tiles, block, config: gl.constexpr, layout: gl.constexpr):
    """Rows [M, width] of tile number `block` in fp32; 0 past the last and right of the head dim."""
    at = tiles.starts(x, block, config.run, config, layout)[:, None] + columns(config, layout)
    return gl.load(at, mask=inside(tiles, block, config, layout), other=0.0).to(gl.float32)


@gluon.jit
def columns(config: gl.constexpr, layout: gl.constexpr):
    return gl.arange(0, config.width, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def inside(tiles, block, config: gl.constexpr, layout: gl.constexpr):
    """Whether elements of tile number `block` are of the tensor."""
    there = tiles.there(block, config, layout)[:, None]
    if config.dim == config.width:
        return there & (columns(config, layout) >= 0)
    else:
        return there & (columns(config, layout) < config.dim)


@gluon.jit
def magnitudes(x):
    """|x|, 0 of what is not finite."""
    size = gl.abs(x)
    return gl.where(size < float("inf"), size, 0.0)


@gluon.jit
def scale_of(top, config: gl.constexpr):
    """The scale that makes the largest magnitude the format's largest number; 1 of zeros."""
    scale = gl.div_rn(top, top * 0.0 + config.largest)
    return gl.where(top == 0, 1.0, gl.maximum(scale, _LEAST_SCALE))


@gluon.jit
def quotients(x, scale, largest: gl.constexpr):
    """Rows [M, D] / scale [M], of magnitudes up to `largest` but for a last bit; NaN stays."""
    moved = gl.where(scale < 2.0**-60, 2.0**64, gl.where(scale > 2.0**100, 2.0**-64, 1.0))
    scale = scale * moved
    most = (scale * largest)[:, None] + gl.zeros_like(x)
    inverse = gl.div_rn(gl.full_like(scale, 1.0), scale)[:, None] + gl.zeros_like(x)
    x = x * moved[:, None]
    x = gl.maximum(gl.minimum(x, most, propagate_nan=_ALL), -most, propagate_nan=_ALL)
    near = x * inverse
    over = gl.fma(near, scale[:, None] + gl.zeros_like(x), -x)
    return gl.fma(-over, inverse, near)
