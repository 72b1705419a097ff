"""Additions to dQ in a fixed order: a counter for each tile, of the CTAs that have added to it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from . import arguments as sizes

ROWS = gl.constexpr(sizes.ROWS)
BEHIND = gl.constexpr(sizes.BEHIND)


@gluon.jit
def take_turn(ctx, visit, share: gl.constexpr = 0):
    """Wait until all CTAs that add to a tile before this one have, if this one does; the tile's counter. Warpgroups
    that share a tile have a counter each, of its first blocks of rows."""
    block = (ctx.keys.row + visit.row) // ROWS + share
    counter = ctx.tensors.turns + (ctx.keys.head + visit.h) * ctx.tensors.turn_blocks + block
    if visit.row < BEHIND:
        gl.atomic_poll(counter, visit.turn, sem="acquire")
    return counter


@gluon.jit
def pass_turn(counter, began):
    """Let the next CTA add to the tile of a counter, if this one has begun with any: when the next dS is there, and the
    additions have long arrived."""
    tma.store_wait(0, read_only=False)
    gl.barrier()
    gl.atomic_add(counter, 1, mask=began, sem="release")
