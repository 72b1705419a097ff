"""Three warps that make CTAs add to a dQ tile after the first one, or in a fixed order (deterministic gradients). Other
roles do not wait.

      turn     claims a tile, or waits for the CTA's turn, up to two ahead  ── turns ─▶ add, pass
      reduce   dQ = dS · K                                                  ── dQ ────▶ add
      add      stores or adds dQ by TMA, and waits until it has arrived     ── added ─▶ pass
      pass     fences all memory, and increments the counter

A turn passes from CTA to CTA through L2: adding up to 32 KB, the fence, the counter and the poll that sees it take
about as long as a tile. In `reduce` that time would add to each tile's product; in warps of their own it delays a tile
only if the previous CTA is late. There are three warps so that `turn` can wait for the next turn while `pass` passes
the last one, and `add` can add the next tile while the fence of `pass` waits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ...nvidia.backward.turns import BEHIND, add_part, claim, count_turn, others_wait, sum_head, take_turn, turn_counter
from ...nvidia.backward.visits import STAGES, at_keys, read_visit
from ...nvidia.pipelines import consumer_state
from ...pieces.scheduler import put_field
from .epilogue import acquire
from .reduce import first_column, first_row


@gluon.jit
def turn_role(ctx):
    """Waits for the CTA's turn at every visited tile, in the order of the visits."""
    turns = ctx.rings.ordered.turns
    state = consumer_state(STAGES)  # of the Q ring, whose slots name the visits, and of the rings of their turns
    more = gl.to_tensor(True)
    while more:
        ctx.rings.q.consumer_wait(state)
        visit = read_visit(ctx, state, field_of_warp)
        its = at_keys(ctx, state, field_of_warp)
        ctx.rings.q.consumer_release(state)
        more = visit.row >= 0 if ctx.config.persistent else visit.more()
        if visit.row >= 0:
            turn = turn_at_tile(its, visit)
            put_tile(turns, state, sum_head(its, visit), its.keys.row + visit.row, turn)
            state = state.step()
    put_tile(turns, state, gl.to_tensor(0), gl.to_tensor(-1), gl.to_tensor(0))


@gluon.jit
def turn_at_tile(ctx, visit):
    """The CTA's turn at the visited dQ tile, once it has come. With turn 0 it stores, with others it adds."""
    if ctx.config.deterministic:
        take_turn(ctx, visit)
        return visit.turn
    else:
        return claim(ctx, visit)


@gluon.jit
def add_role(ctx):
    """Stores or adds dQ of every tile whose turn has come."""
    turns, added = ctx.rings.ordered.turns, ctx.rings.ordered.added
    state = consumer_state(STAGES)
    dq_state = consumer_state(ctx.config.dq_buffers)
    head, row, turn = get_tile(turns, state)
    while row >= 0:
        dq_state = add_parts(ctx, dq_state, head, row, turn)
        if others_wait(turn, ctx.config):
            tma.store_wait(0, read_only=False)
        acquire(added, state)
        added.producer_commit(state)
        state = state.step()
        head, row, turn = get_tile(turns, state)


@gluon.jit
def pass_role(ctx):
    """Passes on the turn of every tile that was added to."""
    turns, added = ctx.rings.ordered.turns, ctx.rings.ordered.added
    state = consumer_state(STAGES)
    head, row, turn = get_tile(turns, state)
    while row >= 0:
        added.consumer_wait(state)
        if others_wait(turn, ctx.config):
            count_turn(turn_counter(ctx, head, row), row < BEHIND)
        added.consumer_release(state)
        state = state.step()
        head, row, turn = get_tile(turns, state)


@gluon.jit
def add_parts(ctx, state, head, row, turn):
    """Adds a tile in parts; releases each buffer once TMA has read it. Returns the next slot's state."""
    config: gl.constexpr = ctx.config
    ring = ctx.rings.ordered.dq
    parts: gl.constexpr = config.dq_parts
    buffers: gl.constexpr = config.dq_buffers
    read = state
    for part in gl.static_range(parts + buffers - 1):
        if part < parts:
            ring.consumer_wait(state)
            at = [head, row + first_row(config, part), first_column(config, part)]
            add_part(ctx, at, ring.tile(state), turn)
            state = state.step()
        if part >= buffers - 1:
            tma.store_wait(min(buffers - 1, parts + buffers - 2 - part))
            ring.consumer_release(read)
            read = read.step()
    return state


@gluon.jit
def put_tile(ring, state, head, row, turn):
    """Sends a tile and the CTA's turn at it to the next roles, in the slot of a consumer's `state`."""
    acquire(ring, state)
    put_field(ring.tile(state, 0), head)
    put_field(ring.tile(state, 1), row)
    put_field(ring.tile(state, 2), turn)
    mbarrier.arrive(ring.full(state.index), count=1)


@gluon.jit
def get_tile(ring, state):
    """(head, first row, turn) of the next tile, as `put_tile` sent it; a row of -1: none follows."""
    ring.consumer_wait(state)
    head, row = field_of_warp(ring.tile(state, 0)), field_of_warp(ring.tile(state, 1))
    turn = field_of_warp(ring.tile(state, 2))
    ring.consumer_release(state)
    return head, row, turn


@gluon.jit
def field_of_warp(slot):
    """Reads one field; called by one warp."""
    return gl.max(slot.load(gl.BlockedLayout([1], [32], [1], [0])), 0)
