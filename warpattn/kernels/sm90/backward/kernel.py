"""Hopper backward: gradients of 128 keys of a head, and what they add to the queries that see them.

load (1 warp)        K, V once; Q, dO by TMA ──▶ rings                          (load.py)
attend 0, 1          S, P, dP, dS; dV and dK in registers; dS ──▶ ring          (attend.py, epilogue.py)
    or weigh         S, P; dV in registers; P ──▶ ring                          (by_product.py)
    and derive       dP, dS; dK in registers; dS ──▶ ring
reduce               dQ = dS · K, added in fp32 by TMA                          (reduce.py)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_wait

from ...nvidia.clipped_rows import ClippedRows
from ...pieces.modifiers import Modifiers
from .attend import attend_role
from .by_product import derive_role, weigh_role
from .context import Context, DenseRows, Tensors, dense_keys, head_and_tile, make_rings, ragged_keys
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
    reads, writes, numbers, turns, sequences, scale, shape, mask_args, score_args,
    config: gl.constexpr, functions: gl.constexpr,
):  # fmt: skip
    """Gradients of a dense or ragged problem.

    reads: q, k, v, dout, descriptors or `ClippedMap`s. writes: dk, dv likewise, and the descriptor of the fp32 dq.
    numbers: of shift and delta. turns: `Turns`. sequences: `Sequences`. `shape` is a `BackwardShape`; `functions` is
    (keep, span, score, slope). Grid: a CTA for each key tile of each key head; of a ragged batch as many as there may
    be.
    """
    gdc_wait()
    mods = Modifiers(functions.keep, functions.span, functions.score, mask_args, score_args)
    if config.ragged:
        tensors = Tensors(
            clipped(reads[0]), clipped(reads[1]), clipped(reads[2]), clipped(reads[3]), clipped(writes[0]),
            clipped(writes[1]), writes[2], numbers[0], numbers[1], turns.pointer, turns.blocks,
        )  # fmt: skip
        if head_and_tile(shape)[1] < gl.load(sequences.tiles):
            start_roles(tensors, ragged_keys(shape, sequences, config), mods, functions.slope, scale, config)
    else:
        tensors = Tensors(
            DenseRows(reads[0]), DenseRows(reads[1]), DenseRows(reads[2]), DenseRows(reads[3]), DenseRows(writes[0]),
            DenseRows(writes[1]), writes[2], numbers[0], numbers[1], turns.pointer, turns.blocks,
        )  # fmt: skip
        start_roles(tensors, dense_keys(shape, config), mods, functions.slope, scale, config)


@gluon.jit
def clipped(argument):
    """The rows of a `ClippedMap`."""
    return ClippedRows(argument.map, argument.step, argument.unit)


@gluon.jit
def start_roles(tensors, keys, mods, slope: gl.constexpr, scale, config: gl.constexpr):
    """Make the rings and run every role in its warps; the topology lists them in this order."""
    ctx = Context(tensors, make_rings(config), keys, mods, slope, scale, config)
    fence_async_shared()  # TMA sees the new barriers
    workers: gl.constexpr = config.topology.workers
    if config.by_product:
        gl.warp_specialize(
            [(weigh_role, (ctx,)), (derive_role, (ctx,)), (reduce_role, (ctx,)), (load_role, (ctx,))],
            workers.warps,
            workers.registers,
        )
    else:
        gl.warp_specialize(
            [(attend_0, (ctx,)), (attend_1, (ctx,)), (reduce_role, (ctx,)), (load_role, (ctx,))],
            workers.warps,
            workers.registers,
        )
