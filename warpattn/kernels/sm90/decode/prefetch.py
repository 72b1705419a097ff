"""Prefetches the first keys of a CTA's range to L2 while the preceding kernel still runs.

This is always safe: the CTA loads the keys after its wait, and L2 holds the last value written. Which keys to prefetch
follows from lengths and block table, which the preceding kernel may still be writing. So the CTA speculates with the
values that it finds (`KeyCache.speculative`): a wrong guess costs a useless prefetch, and nothing else depends on it.

It prefetches K only: while the CTA then reads K from L2, DRAM is free for V (bench/notes.md).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin  # tensor maps are no operands of `gl.inline_asm`

from ...pieces.modifiers import Modifiers
from ...pieces.stream_k import Queue, StreamK, my_queue
from .context import KeyCache
from .load import find_box, in_cache
from .schedule import item_at, my_range, queue_count

SWIZZLED = gl.constexpr(128)  # bytes of a row of a tensor map's box
# Layout of box numbers over a warpgroup's threads: neighbours are in different warps, which issue in parallel.
BOXES = gl.constexpr(gl.DistributedLinearLayout([], [[4], [8], [16], [32], [64]], [[1], [2]], [], [128]))


_PREFETCH = """{
.reg .pred p;
setp.ne.b32 p, $2, 0;
@p cp.async.bulk.prefetch.tensor.4d.L2.global.tile [$1, {$6, $5, $4, $3}];
mov.b32 $0, 0;
}"""


@builtin
def prefetch(desc, coord, wanted, _semantic=None):
    """Prefetches boxes of a 4-D `desc` to L2, one a thread. coord: four int32 tensors of one layout; wanted: a fifth, 0
    in threads that prefetch nothing. It needs no wait: the writes of all SMs go to L2, so a later read of a box finds
    the last value written."""
    operands = [desc.handle, wanted.handle, *(x.handle for x in coord)]
    nothing = wanted.type.to_ir(_semantic.builder)
    _semantic.builder.create_inline_asm(_PREFETCH, "=r,l,r,r,r,r,r", operands, [nothing], False, 1)


@gluon.aggregate
class RangeContext:
    """The fields of a `DecodeContext` that `item_at` reads."""

    keys: KeyCache
    work: gl.tuple  # DecodeShape
    mods: Modifiers
    queue: Queue
    stream_k: StreamK
    config: gl.constexpr


@gluon.jit
def prefetch_range(keys, work, mods, config: gl.constexpr):
    """Prefetches K of `work.prefetched` tiles (at most 128 boxes) of the first head of the range."""
    queue = my_queue(queue_count(work, config))
    stream_k, start = my_range(queue, keys, work, mods, config)
    ctx = RangeContext(keys, work, mods, queue, stream_k, config)
    if start.unit < stream_k.first(queue.cta + 1):
        item = item_at(ctx, start)
        box = gl.arange(0, 128, BOXES)
        tile = gl.minimum(item.begin + box // config.boxes, item.end - 1)
        wanted = (box < gl.minimum(work.prefetched, item.end - item.begin) * config.boxes).to(gl.int32)
        key = item.key_tile(tile) * config.block_n + box % config.boxes * config.box
        found = find_box(ctx, item, key)
        page, head = in_cache(ctx, found.outer), item.part.head + 0 * box
        cols: gl.constexpr = config.padded_qk
        for col in gl.static_range(0, cols, SWIZZLED // config.stored.bytes):
            prefetch(keys.k.desc, (page, found.row, head, 0 * box + col), wanted)
