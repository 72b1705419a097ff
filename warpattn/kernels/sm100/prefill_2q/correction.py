"""Correction warpgroup of the Blackwell kernels: rescales O when the softmax has moved its reference maximum.

It keeps that work, rare as it is, off the path from S to P. For each key tile but the first:

      scale of each row ──▶ does any row need it? ────── ── yes ─▶ wait for O, O *= scale in tensor memory
                                                              └─ no ──▶ (O is not touched)      ──▶ signal: P·V may add

The last O is never touched: the softmax warpgroups normalise it on its way out.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mul2

from ..sync import any_greater_of_role, await_signal, notify

COLUMNS = gl.constexpr(16)  # columns of O at a time, to need few registers


@gluon.jit
def correction_role(ctx):
    """Does nothing if the tile has no rows."""
    if ctx.run.total > 0:
        correct_tiles(ctx)


@gluon.jit
def correct_tiles(ctx):
    """Both query tiles in turn, key tile after key tile."""
    allow_first(ctx)
    for n in range(1, ctx.run.total):
        correct(ctx, 0, n)
        correct(ctx, 1, n)


@gluon.jit
def allow_first(ctx):
    """Allows the first P·V of both accumulators: there is no O to rescale."""
    notify(ctx, ctx.bars.s_consumer.index(0))
    notify(ctx, ctx.bars.s_consumer.index(2))


@gluon.jit
def correct(ctx, wg: gl.constexpr, n):
    """Rescales O of a query tile, before P·V of key tile `n` >= 1."""
    o = ctx.memory.o.index(wg)
    layout: gl.constexpr = o.slice(0, COLUMNS).get_reg_layout()
    await_signal(ctx.bars.c_producer.index(wg), (n - 1) & 1)
    scale = ctx.memory.scales.index(wg).load(gl.SliceLayout(1, layout))
    notify(ctx, ctx.bars.c_consumer.index(wg))
    await_signal(ctx.bars.o_producer.index(wg), (n - 1) & 1)
    if any_greater_of_role(gl.full_like(scale, 1.0), scale):
        for i in gl.static_range(ctx.config.padded_ov_depth // COLUMNS):
            part = o.slice(i * COLUMNS, COLUMNS)
            part.store(mul2(part.load(layout), scale[:, None]))
    notify(ctx, ctx.bars.s_consumer.index(2 * wg))
