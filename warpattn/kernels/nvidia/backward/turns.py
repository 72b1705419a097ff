"""Additions to dQ in a fixed order: a counter for each tile, of the CTAs that have added to it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from . import arguments as sizes

ROWS = gl.constexpr(sizes.ROWS)
BEHIND = gl.constexpr(sizes.BEHIND)


@gluon.jit
def take_turn(ctx, visit):
    """Wait until all CTAs that add to a tile before this one have, if this one does; the tile's counter."""
    counter = turn_counter(ctx, ctx.keys.head + visit.h, ctx.keys.row + visit.row)
    if visit.row < BEHIND:
        gl.atomic_poll(counter, visit.turn, sem="acquire")
    return counter


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
