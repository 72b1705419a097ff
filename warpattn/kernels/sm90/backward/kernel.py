"""Hopper backward: gradients of 128 keys of a head, and what they add to the queries that see them.

load (1 warp)        K, V once; Q, dO by TMA ──▶ rings                          (load.py)
attend 0, 1          S, P, dP, dS; dV and dK in registers; dS ──▶ ring          (attend.py, epilogue.py)
reduce               dQ = dS · K, added in fp32 by TMA                          (reduce.py)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...pieces.modifiers import Modifiers
from .attend import attend_role
from .context import Context, Tensors, keys_of_program, make_rings
from .load import load_role
from .reduce import reduce_role


@gluon.jit
def attend_0(ctx):
    attend_role(ctx, 0)


@gluon.jit
def attend_1(ctx):
    attend_role(ctx, 1)


@gluon.jit
def backward_kernel(
    reads, writes, numbers, scale, shape, mask_args, score_args, config: gl.constexpr, functions: gl.constexpr
):
    """Gradients of a dense problem.

    reads: descriptors of q, k, v, dout. writes: of dk, dv and the fp32 dq. numbers: of shift and delta. `shape` is a
    `BackwardShape`; `functions` is (keep, span, score, slope). Grid: one CTA for each key tile of each key head.
    """
    mods = Modifiers(functions[0], functions[1], functions[2], mask_args, score_args)
    keys = keys_of_program(shape, config.block_n)
    tensors = Tensors(
        reads[0], reads[1], reads[2], reads[3], writes[0], writes[1], writes[2], numbers[0], numbers[1]
    )
    ctx = Context(tensors, make_rings(config), keys, mods, functions[3], scale, config)
    fence_async_shared()
    workers: gl.constexpr = config.topology.workers
    gl.warp_specialize(
        [(attend_0, (ctx,)), (attend_1, (ctx,)), (reduce_role, (ctx,)), (load_role, (ctx,))],
        workers.warps,
        workers.registers,
    )
