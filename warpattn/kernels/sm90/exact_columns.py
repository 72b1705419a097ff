"""P·V for values whose head dim is not a power of two, as one product of exactly their columns.

Triton's products have a power of two of columns, and 16 or 32 columns take as long as 64 where the left operand is in
registers (bench/notes.md, 222): 80 columns as 64 + 16 take as long as 128. wgmma itself takes any multiple of 8, so
its instruction is written here. In registers the accumulator is still parts of powers of two; in shared memory values
are boxes of 64 columns, one after the other, of which the last may have columns that are not multiplied:

      O₀ O₁  +=  P · V        80 columns: O 64 + 16, V in two boxes of 64
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..nvidia.pipelines import make_tiles
from .column_slices import columns_before, columns_in, columns_of, place_in
from .layouts import accumulator_layout, element_type


@gluon.aggregate
class Boxes:
    """Tiles of boxes one after the other, indexed as one descriptor."""

    smem: gl.shared_memory_descriptor  # [tiles * boxes, ..., 64]
    boxes: gl.constexpr

    @gluon.jit
    def index(self, number):
        """The boxes of one tile."""
        tile = ()
        for box in gl.static_range(self.boxes):
            tile += (self.smem.index(number * self.boxes + box),)
        return tile


@gluon.jit
def make_boxes(
    count: gl.constexpr, rows: gl.constexpr, widths: gl.constexpr, dtype: gl.constexpr, clipped: gl.constexpr
):  # fmt: skip
    """Shared memory for `count` tiles of boxes of equal `widths`."""
    boxes: gl.constexpr = len(widths)
    return Boxes(make_tiles(count * boxes, rows, widths[0], dtype, clipped), boxes)


@gluon.jit
def without_padding(tile, widths: gl.constexpr):
    """The parts of a tile of Q or K that are multiplied; those of `widths` where a single one is padded."""
    if len(tile) == len(widths):
        return tile
    else:
        parts = ()
        for part in gl.static_range(len(widths)):
            parts += (columns_of(tile[0], widths, part),)
        return parts


@gluon.jit
def add_product(o, pairs, v, widths: gl.constexpr, element: gl.constexpr):
    """Starts O += P·V; O may be read after a wait. o: parts [64, width] fp32; pairs: P, packed [64, N/8, 4]; v: boxes
    [N, 64] of `element`, or a single tile of several."""
    gl.static_assert(v[0].layout.swizzle_byte_width == 128, "the descriptor of V says so")
    types: gl.constexpr = accumulator_types(o[0].shape[0], widths)
    asm: gl.constexpr = product_asm(v[0].shape[0], widths, element)
    constraints: gl.constexpr = product_constraints(v[0].shape[0], len(v), widths)
    weights = (pairs,)
    return gl.inline_asm(asm, constraints, o + weights + v, types, is_pure=False)


@gluon.constexpr_function
def accumulator_types(rows, widths):
    """Types of the parts of an accumulator."""
    return [gl.distributed_type(gl.float32, [rows, width], accumulator_layout(width)) for width in widths]


@gluon.constexpr_function
def product_asm(keys, widths, element):
    """PTX of a group of wgmma over `keys` in steps of 16. Its operands are the accumulator's registers, tied to those
    before; P's; and the addresses of V's boxes, of which it needs the first.

    The descriptor of V says that 8 rows are 8 * 128 bytes apart, and the next columns a box; bit 62 is the swizzle.
    """
    columns, row = sum(widths), 128
    kind = {gl.bfloat16: "bf16", gl.float16: "f16"}[element_type(element)]
    registers = columns // 2
    p, address = 2 * registers, 2 * registers + keys // 4
    constant = 1 << 62 | (8 * row >> 4) << 32 | (keys * row >> 4) << 16
    accumulator = ", ".join(f"${i}" for i in range(registers))
    steps = [
        f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} {{{accumulator}}}, "
        f"{{${p + i}, ${p + i + 1}, ${p + i + 2}, ${p + i + 3}}}, v, p, 1, 1, 1;"
        for i in range(0, keys // 4, 4)
    ]
    return (
        "{ .reg .pred p; .reg .b32 a; .reg .b64 v; setp.ne.b32 p, 1, 0; "
        f"bfe.u32 a, ${address}, 4, 14; cvt.u64.u32 v, a; or.b64 v, v, {constant}; wgmma.fence.sync.aligned; "
        + f" add.s64 v, v, {16 * row >> 4}; ".join(steps)
        + " wgmma.commit_group.sync.aligned; }"
    )


@gluon.constexpr_function
def product_constraints(keys, boxes, widths):
    """Constraints of the operands of `product_asm`."""
    registers = sum(widths) // 2
    tied = [str(i) for i in range(registers)]
    return ",".join(["=f"] * registers + tied + ["r"] * (keys // 4 + boxes))


@gluon.jit
def stage_parts(staging, widths: gl.constexpr, parts):
    """Writes parts of O to a staging tile in parts of `widths`, and zeros to columns that only the tile has."""
    for part in gl.static_range(len(parts)):
        stage_columns(staging, widths, columns_in(parts, part), parts[part])
    clear_columns(staging, widths, columns_in(parts, len(parts)), parts[0].dtype)


@gluon.jit
def stage_columns(staging, widths: gl.constexpr, column: gl.constexpr, part):
    """Writes a part of O that begins at `column`."""
    place: gl.constexpr = place_in(widths, column)
    tile = staging[place[0]]
    if part.shape[1] != tile.shape[1]:
        tile = tile.slice(place[1], part.shape[1], dim=1)
    tile.store(part)


@gluon.jit
def clear_columns(staging, widths: gl.constexpr, column: gl.constexpr, dtype: gl.constexpr):
    """Writes zeros to the columns from `column` on."""
    if column < columns_before(widths, len(widths)):
        cols: gl.constexpr = column & -column
        zeros = gl.zeros([staging[0].shape[0], cols], dtype, accumulator_layout(cols))
        stage_columns(staging, widths, column, zeros)
        clear_columns(staging, widths, column + cols, dtype)
