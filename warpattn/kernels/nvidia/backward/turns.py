"""Additions to dQ by CTAs that wait for others: each dQ tile has a counter, and the first CTA stores instead of adding.
So dQ need not be zeroed; `finish.py` takes zeros for a tile whose counter is still 0.

      claims          0 ── the first CTA to reach the tile ──▶ 1 ── it has stored ──▶ 2: others add, in any order
      deterministic   n CTAs have added: it is the turn of the next one

With turns, a tile may have several sums, each with turns of its own (`dq_copies`): key tile n adds to sum n % copies.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from . import arguments as sizes

ROWS = gl.constexpr(sizes.ROWS)
BEHIND = gl.constexpr(sizes.BEHIND)


@gluon.jit
def take_turn(ctx, visit):
    """Waits until it is this CTA's turn to add to the visited dQ tile; returns the tile's counter."""
    counter = turn_counter(ctx, sum_head(ctx, visit), ctx.keys.row + visit.row)
    if visit.row < BEHIND:
        gl.atomic_poll(counter, visit.turn, sem="acquire")
    return counter


@gluon.jit
def claim(ctx, visit):
    """0 for the first CTA that reaches the visited dQ tile, else 1, once that CTA has stored. It runs, and has had its
    turn at all its earlier tiles, so it waits for no other before it stores."""
    found = gl.to_tensor(2)
    if visit.row < BEHIND:
        counter = turn_counter(ctx, sum_head(ctx, visit), ctx.keys.row + visit.row)
        found = gl.atomic_max(counter, 1, sem="acquire")
        if found == 1:
            gl.atomic_poll(counter, 2, sem="acquire")
    return gl.minimum(found, 1)


@gluon.jit
def sum_head(ctx, visit):
    """The head index in dQ and its counters of the sum that the CTA adds to; further sums follow after all heads."""
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
    """How many of a head's first `count` key tiles add to the same sum as this CTA."""
    copies: gl.constexpr = ctx.config.dq_copies
    return (count + (copies - 1 - key_tile(ctx) % copies)) // copies


@gluon.jit
def add_part(ctx, at, smem, turn):
    """Adds to a part of a dQ tile by TMA; where tiles have counters, the first CTA stores instead."""
    if ctx.config.counted:
        if turn == 0:
            tma.async_store(ctx.tensors.dq, at, smem)
        else:
            tma.async_atomic_add(ctx.tensors.dq, at, smem)
    else:
        tma.async_atomic_add(ctx.tensors.dq, at, smem)


@gluon.jit
def others_wait(turn, config: gl.constexpr):
    """Whether other CTAs may wait for what this one, whose `turn` it is, adds to a dQ tile."""
    if config.deterministic:
        return turn >= 0
    else:
        return turn == 0


@gluon.jit
def turn_counter(ctx, head, row):
    """The counter of the dQ tile that begins at `row` of `head`, both in the kernels' own numbers."""
    return ctx.tensors.turns + head * ctx.tensors.turn_blocks + row // ROWS


@gluon.jit
def pass_turn(counter, began):
    """Waits until this CTA's additions are in memory, and passes the turn to the next CTA if it has `began` any."""
    tma.store_wait(0, read_only=False)
    count_turn(counter, began)


@gluon.jit
def count_turn(counter, began):
    """Passes the turn to the next CTA, once this one's additions are in memory."""
    gl.barrier()
    gl.atomic_add(counter, 1, mask=began, sem="release")
