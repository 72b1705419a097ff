"""Which key tiles a softmax warpgroup of the 1Q kernel works on: those of a partition, and of them every other one.

      key tiles of a span      0 1 2 3 4 │ 5 6 7 8 │ 9 10 11 12            13 tiles over 3 partitions: 5, 4, 4
      warpgroup 0              0   2   4 │ 5   7   │ 9    11
      warpgroup 1                1   3   │   6   8 │   10    12

Partitions are front-loaded: with T tiles over P partitions, q = T // P and r = T % P, partition p has the tiles from
p·q + min(p, r) to (p + 1)·q + min(p + 1, r). Specification: section 3.11.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..pieces.span import TileSpan


@gluon.aggregate
class TileRun:
    """`total` key tiles of a span, every `step`-th from number `begin` on; the first `masked` need the mask."""

    span: TileSpan
    begin: gl.tensor
    step: gl.constexpr
    masked: gl.tensor
    total: gl.tensor

    @gluon.jit
    def key_tile(self, i):
        """Index of the key tile visited as number `i`."""
        return self.span.key_tile(self.begin + i * self.step)

    @gluon.jit
    def every_other(self, which: gl.constexpr):
        """The tiles of an even (0) or odd (1) number."""
        masked = (gl.maximum(self.masked - which, 0) + 1) // 2
        total = (gl.maximum(self.total - which, 0) + 1) // 2
        return TileRun(self.span, self.begin + which * self.step, self.step * 2, masked, total)


@gluon.jit
def partition_tiles(span, partition, partitions: gl.constexpr, some):
    """The run of one partition; empty where there are fewer tiles than partitions, or where `some` is false."""
    tiles = gl.where(some, span.total, 0)
    size = tiles // partitions
    rest = tiles - size * partitions
    begin = partition * size + gl.minimum(partition, rest)
    total = size + (partition < rest).to(gl.int32)
    masked = gl.maximum(gl.minimum(span.masked - begin, total), 0)
    return TileRun(span, begin, 1, masked, total)
