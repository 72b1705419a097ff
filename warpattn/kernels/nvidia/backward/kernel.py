"""The main kernel of a backward: tensors and work for the roles of an architecture."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from ...pieces.modifiers import Modifiers
from ..clipped_rows import ClippedRows
from .visits import DenseRows, Tensors, Work


@gluon.jit
def backward_kernel(
    reads, writes, numbers, turns, counter, sequences, scale, shape, mask_args, score_args,
    config: gl.constexpr, functions: gl.constexpr, start_roles: gl.constexpr,
):  # fmt: skip
    """Gradients of a dense or ragged problem.

    reads: q, k, v, dout, descriptors or `ClippedMap`s. writes: dk, dv likewise, and the descriptor of the fp32 dq.
    numbers: of shift and delta. turns: `Turns`. counter: int32*, zero before and after. sequences: `Sequences`.
    `shape` is a `BackwardShape`; `functions` is (keep, span, score, slope); `start_roles` makes the rings of an
    architecture and runs its roles. Grid: a CTA for each key tile of each key
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
