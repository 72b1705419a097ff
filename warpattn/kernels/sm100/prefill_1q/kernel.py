"""SM100 1Q: Blackwell attention with one query tile of 128 rows a CTA, for short prompts and split keys.

The two softmax warpgroups work on the same rows. Key tiles alternate between them, even ones through S0 and O0, odd
ones through S1 and O1, so the tensor core is as busy as with two query tiles; at the end the accumulators are combined.

      load warp        Q, K, V by TMA ──▶ shared memory                              (here)
      MMA warp         S0, S1 = Q·K in turn, O0, O1 += P·V                           (mma.py)
      softmax 0, 1     S ──▶ P of every other key tile; then the combination          (here, epilogue.py)
      correction       O *= scale where the softmax's reference moved                (here)

With `splitk_partitions` as many CTAs each take a part of a query tile's key tiles (pieces/span.py), and another
kernel combines their results (nvidia/combine_parts.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..layouts import row_layout
from ..prefill_2q.context import loader, with_scales
from ..prefill_2q.convert import convert_next, finish_scales, first_state
from ..prefill_2q.correction import allow_first, correct
from ..prefill_2q.load import load_k, load_v
from ..prefill_2q.softmax import row_state, softmax_tile
from ..sync import await_signal
from .epilogue import store_combined, store_nothing
from .mma import mma_role


@gluon.jit
def start_1q(ctx, workers: gl.constexpr):
    """Runs every role in its warps."""
    gl.warp_specialize([(correction_role, (ctx,)), (softmax_role, (ctx, 0)), (softmax_role, (ctx, 1)),
                        (mma_role, (ctx,)), (load_role, (ctx,))]
                       + ([(convert_role, (ctx,))] if ctx.config.converts else []),
                       workers.warps, workers.registers)  # fmt: skip


@gluon.jit
def load_role(ctx):
    """Loads Q and K0, K1, V0, K2, V1, K3, … of the run."""
    total = ctx.run.total
    if total > 0:
        ring = loader(ctx)
        state = load_k(ctx, ring, ring.start(), ctx.run.key_tile(0), True)
        if total > 1:
            state = load_k(ctx, ring, state, ctx.run.key_tile(1), False)
        for n in range(total):
            state = load_v(ctx, ring, state, ctx.run.key_tile(n))
            if n + 2 < total:
                state = load_k(ctx, ring, state, ctx.run.key_tile(n + 2), False)


@gluon.jit
def convert_role(ctx):
    """Converts 8-bit tiles in the order of their loads."""
    total = ctx.run.total
    if total > 0:
        state = convert_next(ctx, first_state(ctx), "k")
        if total > 1:
            state = convert_next(ctx, state, "k", False)  # into the second slot
        for n in range(total - 1):
            state = convert_next(ctx, state, "v")
            if n + 2 < total:
                state = convert_next(ctx, state, "k")
        convert_next(ctx, state, "v", False)  # no tile follows
        finish_scales(ctx.config)


@gluon.jit
def softmax_role(ctx, wg: gl.constexpr):
    """Does every other key tile for all rows, then its part of the output."""
    config: gl.constexpr = ctx.config
    if ctx.run.total > 0:
        scaled = with_scales(ctx, wg)
        mine = gl.aggregate_replace(scaled, run=ctx.run.every_other(wg))
        state = row_state(config.MMA_M, row_layout())
        for n in range(mine.run.total):
            state = softmax_tile(mine, state, n, wg)
        await_signal(ctx.bars.o_producer.index(wg), (mine.run.total - 1) & 1, mine.run.total > 0)
        store_combined(scaled, state, wg)
    else:
        if wg == 0 and config.splitk_partitions > 1:
            store_nothing(ctx)


@gluon.jit
def correction_role(ctx):
    """Rescales both accumulators in turn, from their second tiles on."""
    if ctx.run.total > 0:
        allow_first(ctx)
        for n in range(2, ctx.run.total, 2):
            correct(ctx, 0, n // 2)
            if n + 1 < ctx.run.total:
                correct(ctx, 1, n // 2)
