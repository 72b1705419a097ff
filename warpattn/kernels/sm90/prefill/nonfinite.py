"""Finds output tiles that hidden NaN or infinite values may have spoiled, and lists them for recompute.py.

P·V multiplies a hidden value by 0, and 0 times NaN or infinity is NaN. Testing V tiles in the loop over key tiles cost
5 to 18 % of causal prefill (H200). But a value that is not finite spoils its column in every row of the accumulator, so
it is enough to test the first row of the finished output. The first warp, which wrote that
row to shared memory, reads it there, 4 bytes a lane, and votes. If a lane saw such a number, the warp's first
thread, which wrote O[0, :2], puts the tile at the head of the warpgroup's linked list. Each link overwrites the first
4 bytes of its tile's output, so a list may have any length:

      head in shared memory ─▶ tile 71, O[0, :2] ─▶ tile 12, O[0, :2] ─▶ -1

The code is straight-line assembly, some 20 instructions. A branch, or a store of a one-element tensor, made the
compiler keep addresses in registers across the loop over key tiles and spill 27; reading the thread number from %tid
made it move P to other registers in every iteration of that loop.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...nvidia.finite import exponents
from ..layouts import THREADS


@gluon.jit
def nothing_seen():
    """The value of `seen` before the first tile."""
    return gl.to_tensor(0)


@gluon.jit
def seen_in(tile, seen):
    """`seen`, with a sign bit set in a lane whose 32 bits of the first row of a tile [64, C] in shared memory hold a
    number that is not finite. Only the first warp's result is meaningful, after it has written its rows."""
    return gl.inline_asm(
        look_asm(tile.shape[0], tile.shape[1], tile.dtype), "=r,r,r,r", [tile, seen, threads()], gl.int32
    )


@gluon.jit
def leave(head, place, out, seen):
    """If the first warp has `seen` a number that is not finite and `place` is not negative, writes the tile's `place`
    to the list's `head` and the previous head into the tile's output `out` (both in shared memory)."""
    gl.inline_asm(leave_asm(out.dtype), "r,r,r,r,r", [head, place, out, seen, threads()])


@gluon.jit
def threads():
    """Every thread's number in its warpgroup, [32, 4]."""
    rows = gl.arange(0, 32, gl.SliceLayout(1, THREADS))
    columns = gl.arange(0, 4, gl.SliceLayout(0, THREADS))
    return 4 * rows[:, None] + columns[None, :]


@gluon.constexpr_function
def look_asm(rows, columns, dtype):
    """PTX of `seen_in`: tests the first 128 bytes of every block of columns, one row or several of a narrow tile."""
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
    """PTX of `leave` for outputs of `dtype`."""
    signs = exponents(dtype)[2]
    return (
        f"{{ .reg .pred p; .reg .b32 x; and.b32 x, $3, {signs}; setp.ne.b32 p, x, 0; "
        "vote.sync.any.pred p, p, 0xffffffff; setp.ge.and.s32 p, $1, 0, p; setp.eq.and.s32 p, $4, 0, p; "
        "@p ld.shared.b32 x, [$0]; @p st.shared.b32 [$0], $1; @p st.shared.b32 [$2], x; }"
    )


@gluon.jit
def peek(smem):
    """Reads the first 32 bits of a tile in shared memory, in every thread."""
    return gl.inline_asm("ld.shared.b32 $0, [$1];", "=r,r", [smem], gl.int32)


@gluon.jit
def poke(smem, value):
    """Writes the first 32 bits of a tile in shared memory, from every thread."""
    gl.inline_asm("st.shared.b32 [$0], $1;", "r,r", [smem, gl.to_tensor(value)])
