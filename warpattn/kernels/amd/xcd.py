"""Which output tile a workgroup of gfx942 or gfx950 takes: neighbours that share keys go to the same XCD.

The hardware assigns workgroups to the eight XCDs in turn, and each XCD has an L2 of its own (4 MiB). The permutation
below gives an XCD consecutive tiles, and with them all tiles of a key head, whose K and V it then reads once.

      workgroup   0 1 2 .. 7 | 8 9 ..        XCD of workgroup w: w % 8
      tile        0 n 2n ..  | 1 n+1 ..      n = tiles per XCD
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

XCDS = gl.constexpr(8)


@gluon.jit
def tile_of_workgroup(number, total):
    """A permutation of 0 .. total-1 that gives every XCD consecutive tiles."""
    xcd = number % XCDS
    each = total // XCDS
    longer = total - each * XCDS  # XCDs with one tile more
    return xcd * each + gl.minimum(xcd, longer) + number // XCDS
