"""Tiles whose output may owe NaN to a hidden value: found at the end of a row tile, and left to recompute.py.

P·V multiplies a hidden value by 0, and 0 times NaN or infinity is NaN. Looking at the values in the loop over key tiles
cost 5 to 18 % of causal prefill (H200). But a value that is not finite spoils its column in every row of the
accumulator, so one row a quad of lanes shows it, once, in a few additions. The warpgroup then leaves the tile: the
place of the one that it left before goes into the tile's output, so that the output is the list, however long:

      end of the role ─▶ tile 71, O[0, :2] ─▶ tile 12, O[0, :2] ─▶ -1

All of it is straight code on scalars. A branch here, or a store of a tensor of one element, made the compiler keep
addresses in registers beside the loop over key tiles, and spill 27 of them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...pieces.softmax import as_quads, lane_sum


@gluon.jit
def nonfinite_of(o):
    """What is NaN where O [64, Dv], in parts, holds values that are not finite, by 8 of 16 rows of every warp: [32, 4],
    else 0."""
    total = upper_sum(o[0])
    for part in gl.static_range(1, len(o)):
        total += gl.convert_layout(upper_sum(o[part]), total.type.layout, assert_trivial=True)
    return total - total


@gluon.jit
def upper_sum(o):
    """The sum of each lane's part of a row, of 8 of 16 rows of every warp: [32, 4]."""
    rows: gl.constexpr = o.shape[0]
    upper, _ = o.reshape([rows // 16, 2, 8, o.shape[1]]).permute((0, 2, 3, 1)).split()
    return lane_sum(as_quads(upper.reshape([rows // 2, o.shape[1]])))


@gluon.jit
def report(smem, nonfinite, place):
    """Each thread whose `nonfinite` is NaN writes the tile's place, which no other tile of the CTA has, to `smem`."""
    gl.inline_asm(_REPORT, "r,r,f", [smem, place, nonfinite])


@gluon.jit
def leave(left, reported, place, there, out):
    """The place of the tile that a warpgroup has left last, before `left`: this one, if it is what `reported` holds
    and the tile has rows. Then `left` goes into its output `out` in shared memory."""
    found = (peek(reported) == place) & there
    gl.inline_asm(_LEAVE, "r,r,r", [out, left, found.to(gl.int32)])
    return gl.where(found, place, left)


@gluon.jit
def peek(smem):
    """The first 32 bits of a tile in shared memory, read by every thread."""
    return gl.inline_asm("ld.shared.b32 $0, [$1];", "=r,r", [smem], gl.int32)


@gluon.jit
def poke(smem, value):
    """Write the first 32 bits of a tile in shared memory, by every thread."""
    gl.inline_asm("st.shared.b32 [$0], $1;", "r,r", [smem, gl.to_tensor(value)])


_REPORT = gl.constexpr("{ .reg .pred p; setp.nan.f32 p, $2, $2; @p st.shared.b32 [$0], $1; }")
# The thread that starts the copy by TMA has written, too, so its fence suffices.
_LEAVE = gl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.shared.b32 [$0], $1; @p fence.proxy.async.shared::cta; }"
)
