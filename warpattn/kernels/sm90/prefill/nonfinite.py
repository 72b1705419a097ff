"""Tiles whose output may owe NaN to a hidden value: found at the end of a row tile, and left to recompute.py.

P·V multiplies a hidden value by 0, and 0 times NaN or infinity is NaN. Looking at the values in the loop over key tiles
cost 5 to 18 % of causal prefill (H200). But a value that is not finite spoils its column in every row of the
accumulator, so the first row shows it, once. The first warp, which wrote that row to shared memory, reads it there
before it goes out, 4 bytes a lane, and agrees whether a lane saw such a number; its first thread, which wrote
O[0, :2], then puts the tile at the head of the warpgroup's list. The list's links are in the outputs of the tiles, so
it may be of any length:

      head in shared memory ─▶ tile 71, O[0, :2] ─▶ tile 12, O[0, :2] ─▶ -1

All of it is straight code, some 20 instructions. A branch here, or a store of a tensor of one element, made the
compiler keep addresses in registers beside the loop over key tiles, and spill 27 of them. With the number of the thread
from %tid it moved P to other registers in every turn of that loop.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...nvidia.finite import exponents
from ..layouts import THREADS


@gluon.jit
def nothing_seen():
    """What `seen_in` begins with."""
    return gl.to_tensor(0)


@gluon.jit
def seen_in(tile, seen):
    """`seen`, with a sign bit of a lane's 32 bits set if the first row of a tile [64, C] in shared memory has a number
    that is not finite. It is right in the first warp, once that has written its rows; other warps get any value."""
    return gl.inline_asm(
        look_asm(tile.shape[0], tile.shape[1], tile.dtype), "=r,r,r,r", [tile, seen, threads()], gl.int32
    )


@gluon.jit
def leave(head, place, out, seen):
    """Put `place`, a tile's, at the `head` of a list, and what was there into the tile's output `out`, both in shared
    memory, if the first warp has `seen` a number that is not finite and `place` is not negative."""
    gl.inline_asm(leave_asm(out.dtype), "r,r,r,r,r", [head, place, out, seen, threads()])


@gluon.jit
def threads():
    """The number of every thread in its warpgroup."""
    rows = gl.arange(0, 32, gl.SliceLayout(1, THREADS))
    columns = gl.arange(0, 4, gl.SliceLayout(0, THREADS))
    return 4 * rows[:, None] + columns[None, :]


@gluon.constexpr_function
def look_asm(rows, columns, dtype):
    """The look of `seen_in` at the first 128 bytes of every block of columns: a row, or several of narrow tiles."""
    bits, lowest, _ = exponents(dtype)
    blocks = max(1, columns * dtype.primitive_bitwidth // 1024)
    looks = (
        f"ld.shared.b32 x, [at + {128 * rows * i}]; and.b32 x, x, {bits}; add.u32 x, x, {lowest}; or.b32 $0, $0, x; "
        for i in range(blocks)
    )
    begin = (
        "{ .reg .b32 at, x; and.b32 at, $3, 31; mad.lo.u32 at, at, 4, $1; bar.warp.sync 0xffffffff; mov.b32 $0, $2; "
    )
    return begin + "".join(looks) + "}"


@gluon.constexpr_function
def leave_asm(dtype):
    """`leave` for outputs of a type."""
    signs = exponents(dtype)[2]
    return (
        f"{{ .reg .pred p; .reg .b32 x; and.b32 x, $3, {signs}; setp.ne.b32 p, x, 0; "
        "vote.sync.any.pred p, p, 0xffffffff; setp.ge.and.s32 p, $1, 0, p; setp.eq.and.s32 p, $4, 0, p; "
        "@p ld.shared.b32 x, [$0]; @p st.shared.b32 [$0], $1; @p st.shared.b32 [$2], x; }"
    )


@gluon.jit
def peek(smem):
    """The first 32 bits of a tile in shared memory, read by every thread."""
    return gl.inline_asm("ld.shared.b32 $0, [$1];", "=r,r", [smem], gl.int32)


@gluon.jit
def poke(smem, value):
    """Write the first 32 bits of a tile in shared memory, by every thread."""
    gl.inline_asm("st.shared.b32 [$0], $1;", "r,r", [smem, gl.to_tensor(value)])
