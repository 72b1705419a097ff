"""The kernel that lists the key tiles of packed sequences, those of the longest sequence first: a tile's work grows
with the length of its sequence, so long tiles begin before short ones. A sequence's last tile is first where CTAs wait
for those with later keys.

      list     number of tiles, tiles of a lap | sequence, tile | sequence, tile | ...      int32, a record of two each
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .rows import LANES, lane_layout


@gluon.jit
def key_tiles_kernel(cu_k, tiles, batch, section, at_once, config: gl.constexpr):
    """Writes the records of one sequence after those of all longer ones. `section`, `at_once`: as in `KeyTileOrder`.
    Grid: (batch,)."""
    b = gl.program_id(0)
    length = gl.load(cu_k + b + 1) - gl.load(cu_k + b)
    before = gl.zeros([LANES], gl.int32, lane_layout())
    every = gl.zeros([LANES], gl.int32, lane_layout())
    for i in range(0, batch, LANES):
        other = i + gl.arange(0, LANES, lane_layout())
        inside = other < batch
        its = gl.load(cu_k + other + 1, mask=inside, other=0) - gl.load(cu_k + other, mask=inside, other=0)
        count = (its + config.block_n - 1) // config.block_n
        every += count
        before += gl.where((its > length) | ((its == length) & (other < b)), count, 0)
    start = gl.sum(before, 0)
    if b == 0:
        total = gl.sum(every, 0)
        laps = gl.maximum((total * section + at_once - 1) // at_once, 1)
        gl.store(tiles, total)
        gl.store(tiles + 1, (total * section + laps - 1) // laps)
    count = (length + config.block_n - 1) // config.block_n
    for i in range(0, count, LANES):
        n = i + gl.arange(0, LANES, lane_layout())
        gl.store(tiles + 2 + 2 * (start + n), b + gl.zeros_like(n), mask=n < count)
        gl.store(tiles + 3 + 2 * (start + n), count - 1 - n if config.waits_for_later else n, mask=n < count)
