"""From a mask's key interval to an order of key tiles that every role agrees on.

A mask answers, for the rows of one query tile, with (first, full_lo, full_hi, last): keys outside [first, last) are
hidden from every row, keys in [full_lo, full_hi) are visible to every row. Tiles are visited in the order

      keys   first ......... full_lo ............... full_hi ......... last
      order         2 ◀─ masked │      3 ◀─ unmasked     │    1 ◀─ masked

so that the masked ones are first and the long unmasked run needs no per-element test.

Where the keys of a tile are shared out, a CTA has a run of them. Partitions are front-loaded: with T tiles over P
partitions, q = T // P and r = T % P, partition p has the tiles from p·q + min(p, r) to (p + 1)·q + min(p + 1, r). Two
warpgroups of a CTA may take every other tile (specification: section 3.11):

      key tiles of a span      0 1 2 3 4 │ 5 6 7 8 │ 9 10 11 12            13 tiles over 3 partitions: 5, 4, 4
      warpgroup 0              0   2   4 │ 5   7   │ 9    11
      warpgroup 1                1   3   │   6   8 │   10    12
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.aggregate
class TileSpan:
    """Key tiles of one query tile: `total` of them, the first `masked` of which need the element-wise mask."""

    last: gl.tensor
    right: gl.tensor
    full_lo: gl.tensor
    full_hi: gl.tensor
    masked: gl.tensor
    total: gl.tensor

    @gluon.jit
    def key_tile(self, i):
        """Index of the key tile visited as number `i`."""
        right = self.last - 1 - i
        left = self.full_lo - 1 - (i - self.right)
        full = self.full_hi - 1 - (i - self.masked)
        return gl.where(i < self.right, right, gl.where(i < self.masked, left, full))


@gluon.jit
def tile_span(span, block_n: gl.constexpr):
    """Round a key interval (first, full_lo, full_hi, last) to tiles of `block_n` keys; at least one tile."""
    first = span[0] // block_n
    last = gl.maximum((span[3] + block_n - 1) // block_n, first + 1)
    lo = gl.maximum((span[1] + block_n - 1) // block_n, first)
    hi = gl.minimum(span[2] // block_n, last)
    some = lo < hi
    lo = gl.where(some, lo, first)
    hi = gl.where(some, hi, first)
    right = last - hi
    return TileSpan(last, right, lo, hi, right + lo - first, last - first)


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
def partition_tiles(span, partition, partitions, some):
    """The run of one partition; empty where there are fewer tiles than partitions, or where `some` is false."""
    tiles = gl.where(some, span.total, 0)
    size = tiles // partitions
    rest = tiles - size * partitions
    begin = partition * size + gl.minimum(partition, rest)
    total = size + (partition < rest).to(gl.int32)
    masked = gl.maximum(gl.minimum(span.masked - begin, total), 0)
    return TileRun(span, begin, 1, masked, total)
