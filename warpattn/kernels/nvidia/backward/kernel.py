"""The main kernel of a backward on NVIDIA GPUs, which runs an architecture's roles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_wait

from ...pieces.modifiers import modifiers
from ..clipped_rows import ClippedRows
from .visits import Context, DenseRows, Tensors, Work, first_keys


@gluon.jit
def backward_kernel(
    reads, writes, numbers, turns, counter, sequences, scale, shape, mask_args, score_args,
    config: gl.constexpr, functions: gl.constexpr, code: gl.constexpr,
):  # fmt: skip
    """Gradients of a dense or ragged problem.

    reads: q, k, v, dout, descriptors or `ClippedMap`s. writes: dk, dv likewise, and the descriptor of the fp32 dq.
    numbers: of shift and delta. turns: `Turns`. counter: int32*, zero before and after. sequences: `Sequences`.
    `shape` is a `BackwardShape`; `functions` is (keep, span, score, slope); `code` is a `DeviceCode`. Grid: a CTA for
    each key tile of each key head, of a ragged batch as many as there may be; any number if `config.persistent`.
    """
    gdc_wait()
    mods = modifiers(functions, mask_args, score_args)
    if config.ragged:
        tensors = Tensors(
            clipped(reads[0]), clipped(reads[1]), clipped(reads[2]), clipped(reads[3]), clipped(writes[0]),
            clipped(writes[1]), writes[2], numbers[0], numbers[1], turns.pointer, turns.blocks, counter,
        )  # fmt: skip
        work = Work(gl.load(sequences.tiles), shape.section, shape.heads, shape, sequences)
        if gl.program_id(0) < work.total():
            start(tensors, work, mods, functions.slope, scale, config, code)
    else:
        tensors = Tensors(
            DenseRows(reads[0]), DenseRows(reads[1]), DenseRows(reads[2]), DenseRows(reads[3]), DenseRows(writes[0]),
            DenseRows(writes[1]), writes[2], numbers[0], numbers[1], turns.pointer, turns.blocks, counter,
        )  # fmt: skip
        work = Work(shape.tiles, shape.section, shape.heads, shape, sequences)
        start(tensors, work, mods, functions.slope, scale, config, code)


@gluon.jit
def start(tensors, work, mods, slope: gl.constexpr, scale, config: gl.constexpr, code: gl.constexpr):
    """Makes the rings and runs the roles."""
    ctx = Context(tensors, code.make_rings(config), work, first_keys(work, config), mods, slope, scale, config)
    fence_async_shared()  # TMA sees the new barriers
    code.start_roles(ctx)


@gluon.jit
def clipped(argument):
    """The `ClippedRows` of a `ClippedMap`."""
    return ClippedRows(argument.map, argument.step, argument.unit)
