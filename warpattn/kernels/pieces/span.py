"""Turns a mask's key interval into an order of key tiles that every role of a kernel follows.

For the rows of one query tile, a mask gives (first, full_lo, full_hi, last): keys outside [first, last) are hidden from
every row, keys in [full_lo, full_hi) are visible to every row. Tiles are visited in the order 1, 2, 3:

      keys   first ......... full_lo ............... full_hi ......... last
      order         2 ◀─ masked │      3 ◀─ unmasked     │    1 ◀─ masked

So the masked tiles come first, and the long unmasked run needs no per-element test.
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
    """Rounds a key interval (first, full_lo, full_hi, last) to tiles of `block_n` keys; at least one tile."""
    first_key, full_lo, full_hi, last_key = span
    first = first_key // block_n
    last = gl.maximum((last_key + block_n - 1) // block_n, first + 1)
    lo = gl.maximum((full_lo + block_n - 1) // block_n, first)
    hi = gl.minimum(full_hi // block_n, last)
    some = lo < hi
    lo = gl.where(some, lo, first)
    hi = gl.where(some, hi, first)
    right = last - hi
    return TileSpan(last, right, lo, hi, right + lo - first, last - first)
