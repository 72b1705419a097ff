"""Tiles of the walked side: loaded into registers while the tile before is multiplied, then through LDS.

      DRAM ─▶ registers ─▶ LDS ─▶ registers        one slot for each operand, see `SideConfig.streams`

The rows of K, Q and dO are operands twice: transposed in S and dP, as they are in the gradients. LDS holds them once
for each, so that both reads are of 16 or 8 bytes a lane.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna3

from ...amd.kv_buffer import make_register_buffer
from ..layouts import output_operand, product_layout, scores_operand


@gluon.aggregate
class Buffers:
    """LDS of the operands, in the order of `SideConfig.streams`."""

    scores: gl.base_value
    values: gl.base_value
    first: gl.base_value  # of dQ or dK
    second: gl.base_value  # of dV; the same as `first` where queries are held


@gluon.aggregate
class Stage:
    """A tile in registers, as it was loaded; `second` is that of `first` where queries are held."""

    scores: gl.tensor
    values: gl.tensor
    first: gl.tensor
    second: gl.tensor


@gluon.jit
def make_buffers(config: gl.constexpr):
    """Allocates the `Buffers`."""
    streams: gl.constexpr = config.streams
    scores, values = make_register_buffer(streams[0], 0), make_register_buffer(streams[1], 0)
    first = make_register_buffer(streams[2], 0)
    if config.side == "keys":
        return Buffers(scores, values, first, make_register_buffer(streams[3], 0))
    else:
        return Buffers(scores, values, first, first)


@gluon.jit
def load_tile(buffers, sources, row, config: gl.constexpr):
    """Request the tile from `row` on of both sources, (K, V) or (Q, dO); zeros past the end."""
    scores = load(buffers.scores, sources[0], row)
    values = load(buffers.values, sources[1], row)
    first = load(buffers.first, sources[0], row)
    if config.side == "keys":
        return Stage(scores, values, first, load(buffers.second, sources[1], row))
    else:
        return Stage(scores, values, first, first)


@gluon.jit
def load(buffer, source, row):
    """Starts loading one operand."""
    return buffer.load_from_dram(source, row, 0, buffer.pages(source, row))


@gluon.jit
def products(buffers, stage, held, delta, config: gl.constexpr):
    """(S, dP - delta) of the `held` rows, (Q, dO) or (K, V), with a tile; `delta` broadcasts to its shape. Where keys
    are held it is a number for each of a lane's elements: there the sums begin with it, in the same registers."""
    zero = gl.zeros([config.waves_m * config.instr, config.walked], gl.float32, product_layout(config))
    operand: gl.constexpr = scores_operand(config, 1)
    s = cdna3.mfma(held[0], buffers.scores.operand(stage.scores, operand), zero)
    values = buffers.values.operand(stage.values, operand)
    if config.side == "keys":
        return s, cdna3.mfma(held[1], values, zero - delta)
    else:
        return s, cdna3.mfma(held[1], values, zero) - delta


@gluon.jit
def add_product(left, buffer, stage, total, config: gl.constexpr):
    """total + left · operand."""
    return cdna3.mfma(left, buffer.operand(stage, output_operand(config, 1)), total)
