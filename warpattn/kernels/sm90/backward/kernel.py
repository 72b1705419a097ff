"""Hopper backward: gradients of 128 keys of a head, and what they add to the queries that see them; then the next keys.

load (1 warp)        K, V; Q, dO by TMA ──▶ rings                               (load.py)
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
from .context import Context, DenseRows, Tensors, Work, keys_at, make_rings
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
    reads, writes, numbers, turns, counter, sequences, scale, shape, mask_args, score_args,
    config: gl.constexpr, functions: gl.constexpr,
):  # fmt: skip
    """Gradients of a dense or ragged problem.

    reads: q, k, v, dout, descriptors or `ClippedMap`s. writes: dk, dv likewise, and the descriptor of the fp32 dq.
    numbers: of shift and delta. turns: `Turns`. counter: int32*, zero before and after. sequences: `Sequences`.
    `shape` is a `BackwardShape`; `functions` is (keep, span, score, slope). Grid: a CTA for each key tile of each key
    head, of a ragged batch as many as there may be; any number of them if `config.persistent`.
    """
    gdc_wait()
    mods = Modifiers(functions.keep, functions.span, functions.score, mask_args, score_args)
    if config.ragged:
        tensors = Tensors(
            clipped(reads[0]), clipped(reads[1]), clipped(reads[2]), clipped(reads[3]), clipped(writes[0]),
            clipped(writes[1]), writes[2], numbers[0], numbers[1], turns.pointer, turns.blocks, counter,
        )  # fmt: skip
        work = Work(gl.load(sequences.tiles), shape.section, shape.heads, shape, sequences)
        if gl.program_id(0) < work.total():
            start_roles(tensors, work, mods, functions.slope, scale, config)
    else:
        tensors = Tensors(
            DenseRows(reads[0]), DenseRows(reads[1]), DenseRows(reads[2]), DenseRows(reads[3]), DenseRows(writes[0]),
            DenseRows(writes[1]), writes[2], numbers[0], numbers[1], turns.pointer, turns.blocks, counter,
        )  # fmt: skip
        work = Work(shape.tiles, shape.section, shape.heads, shape, sequences)
        start_roles(tensors, work, mods, functions.slope, scale, config)


@gluon.jit
def clipped(argument):
    """The rows of a `ClippedMap`."""
    return ClippedRows(argument.map, argument.step, argument.unit)


@gluon.jit
def start_roles(tensors, work, mods, slope: gl.constexpr, scale, config: gl.constexpr):
    """Make the rings and run every role in its warps; the topology lists them in this order."""
    keys = keys_at(work, gl.program_id(0), config)
    ctx = Context(tensors, make_rings(config), work, keys, mods, slope, scale, config)
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
