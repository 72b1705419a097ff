"""Additions to dQ in a fixed order: a counter for each tile, of the CTAs that have added to it.

The CTA whose turn is the first writes the tile, so nothing is zero before, and a tile whose counter stays 0 holds
nothing: `finish.py` takes zeros for it. A tile may have several sums, each with turns of its own (`dq_copies`): key
tile n adds to sum n % copies.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from . import arguments as sizes

ROWS = gl.constexpr(sizes.ROWS)
BEHIND = gl.constexpr(sizes.BEHIND)


@gluon.jit
def take_turn(ctx, visit):
    """Wait until all CTAs that add to a tile before this one have, if this one does; the tile's counter."""
    counter = turn_counter(ctx, sum_head(ctx, visit), ctx.keys.row + visit.row)
    if visit.row < BEHIND:
        gl.atomic_poll(counter, visit.turn, sem="acquire")
    return counter


@gluon.jit
def sum_head(ctx, visit):
    """The head of dQ and its counters that the CTA adds to: the sums of all heads come one after the other."""
    head = ctx.keys.head + visit.h
    if ctx.config.dq_copies > 1:
        head += key_tile(ctx) % ctx.config.dq_copies * (ctx.work.heads * ctx.work.shape.group)
    return head


@gluon.jit
def key_tile(ctx):
    """Number of the CTA's key tile in its head."""
    return ctx.keys.first // ctx.config.block_n


@gluon.jit
def sharing(ctx, count):
    """How many of a head's first `count` key tiles add to the sum that the CTA adds to."""
    copies: gl.constexpr = ctx.config.dq_copies
    return (count + (copies - 1 - key_tile(ctx) % copies)) // copies


@gluon.jit
def add_part(ctx, at, smem, turn):
    """Add to a part of a tile of dQ by TMA; in a fixed order the first CTA writes it."""
    if ctx.config.deterministic:
        if turn == 0:
            tma.async_store(ctx.tensors.dq, at, smem)
        else:
            tma.async_atomic_add(ctx.tensors.dq, at, smem)
    else:
        tma.async_atomic_add(ctx.tensors.dq, at, smem)


@gluon.jit
def turn_counter(ctx, head, row):
    """The counter of the tile that begins at a row of a head, both in the kernels' own numbers."""
    return ctx.tensors.turns + head * ctx.tensors.turn_blocks + row // ROWS


@gluon.jit
def pass_turn(counter, began):
    """Let the next CTA add to the tile of a counter when all additions have arrived, if this one has begun with any."""
    tma.store_wait(0, read_only=False)
    count_turn(counter, began)


@gluon.jit
def count_turn(counter, began):
    """Let the next CTA add: the additions of this one have arrived."""
    gl.barrier()
    gl.atomic_add(counter, 1, mask=began, sem="release")
