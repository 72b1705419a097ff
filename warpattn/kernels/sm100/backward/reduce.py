"""The warpgroup of Blackwell's backward that adds dQ to global memory, by TMA in fp32."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import fence_async_shared, tma

from ...nvidia.backward.turns import BEHIND, add_part, pass_turn, sum_head, take_turn
from ...nvidia.backward.visits import STAGES, read_visit
from ...nvidia.pipelines import consumer_state
from ..sync import await_signal, signal


@gluon.jit
def reduce_role(ctx):
    """Adds dQ of every visited tile."""
    bars = ctx.rings.bars
    state = consumer_state(STAGES)  # of the visits
    tile = consumer_state(1)
    more = gl.to_tensor(True)
    turn = ctx.tensors.turns
    began = gl.to_tensor(False)
    while more:
        await_signal(bars.dq, tile.phase)
        visit = read_visit(ctx, state)
        parts: gl.constexpr = ctx.config.dq_parts
        for part in gl.static_range(parts):
            dq = query_gradients(ctx, part)
            if part == parts - 1:
                signal(bars.dq_read)
            if ctx.config.deterministic and part == 0:
                pass_turn(turn, began)
                began = visit.row < BEHIND
                turn = take_turn(ctx, visit)
            add_columns(ctx, dq, visit, part)
        more = visit.more()
        state = state.step()
        tile = tile.step()
    if ctx.config.deterministic:
        pass_turn(turn, began)
    tma.store_wait(0)  # shared memory must outlive the last copy's reads


@gluon.jit
def query_gradients(ctx, part: gl.constexpr):
    """A part of the columns of dQ; all of them, transposed, where lanes are columns."""
    if ctx.config.transposed:
        return ctx.rings.sums.dq.load()
    else:
        cols: gl.constexpr = ctx.config.dq_cols
        return ctx.rings.sums.dq.slice(part * cols, cols).load()


@gluon.jit
def add_columns(ctx, dq, visit, part: gl.constexpr):
    """Adds a part of dQ through shared memory, once TMA has read what it held."""
    config: gl.constexpr = ctx.config
    smem = ctx.rings.dq
    tma.store_wait(0)
    gl.barrier()
    tile = smem.reshape([config.block_m, config.dq_cols])
    if config.transposed:
        tile.permute((1, 0)).store(dq)
    else:
        tile.store(dq)
    fence_async_shared()
    gl.barrier()
    at = [sum_head(ctx, visit), ctx.keys.row + visit.row, part * config.dq_cols]
    add_part(ctx, at, smem, visit.turn)
