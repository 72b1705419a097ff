"""The first keys of a CTA's share are asked for in L2 while the launch in front still runs.

Nobody has to promise anything for that: they are read behind the wait, and L2 has what was written last. But which keys
they are follows from lengths and a table that the launch in front may be writing. So this is a guess from what stands
there now (`Keys.guessed`): what it asks for in vain costs time, and nothing else may depend on it.

Keys only: while the CTA reads them from L2, DRAM has their values to bring (bench/notes.md).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...nvidia.l2_prefetch import prefetch
from ...pieces.modifiers import Modifiers
from ...pieces.stream_k import Shares
from .context import Grid, Keys, item_at, take_share
from .load import find_box, in_cache

SWIZZLED = gl.constexpr(64)  # columns of a tensor map's box
# Of box numbers over the threads of a warpgroup: neighbours belong to different warps, which ask side by side.
BOXES = gl.constexpr(gl.DistributedLinearLayout([], [[4], [8], [16], [32], [64]], [[1], [2]], [], [128]))


@gluon.aggregate
class Walk:
    """What it takes to walk along a CTA's share: a part of a `DecodeContext`."""

    keys: Keys
    work: Grid
    mods: Modifiers
    shares: Shares
    config: gl.constexpr


@gluon.jit
def prefetch_share(keys, work, mods, config: gl.constexpr):
    """Ask for keys of as many tiles as the configuration says (128 boxes at most), in the first head of the share."""
    shares, start = take_share(keys, work, mods, config)
    ctx = Walk(keys, work, mods, shares, config)
    if start.unit < shares.first(gl.program_id(0) + 1):
        item = item_at(ctx, start)
        box = gl.arange(0, 128, BOXES)
        tile = gl.minimum(item.begin + box // config.boxes, item.end - 1)
        wanted = (box < gl.minimum(config.prefetched, item.end - item.begin) * config.boxes).to(gl.int32)
        key = item.key_tile(tile) * config.block_n + box % config.boxes * config.box
        outer, row = find_box(ctx, item, key)
        page, head = in_cache(ctx, outer), item.part.head + 0 * box
        cols: gl.constexpr = config.padded_qk
        for col in gl.static_range(0, cols, SWIZZLED):
            prefetch(keys.k[0], (page, row, head, 0 * box + col), wanted)
