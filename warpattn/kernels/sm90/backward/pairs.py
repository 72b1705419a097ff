"""Tiles of P and dS as packed pairs of 16-bit numbers, and what products and shared memory take instead of them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...pieces.softmax import as_quads, pack, unpack
from ..layouts import accumulator_layout, element_type, operand_layout


@gluon.jit
def tile_of(pairs, config: gl.constexpr):
    """Packed pairs as a [64, M] tensor in the layout of an accumulator."""
    tile = unpack(pairs, element_type(config.element))
    return gl.convert_layout(tile, accumulator_layout(config.block_m), assert_trivial=True)


@gluon.jit
def fp32(pairs, config: gl.constexpr):
    """Packed pairs as [64, M] fp32 in the layout of an accumulator."""
    return tile_of(pairs, config).to(gl.float32)


@gluon.jit
def operand(pairs, config: gl.constexpr, cols: gl.constexpr):
    """Packed pairs as the left operand [64, M] of a product with `cols` columns."""
    tile = unpack(pairs, element_type(config.element))
    return gl.convert_layout(tile, operand_layout(cols), assert_trivial=True)


@gluon.jit
def multiply_pairs(a, b, config: gl.constexpr):
    """Multiplies packed pairs and rounds; bf16 takes half the instructions of fp32."""
    dtype: gl.constexpr = element_type(config.element)
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], gl.int32, is_pure=True, pack=1)
    else:
        return pack(as_quads(fp32(a, config) * fp32(b, config)), dtype)
