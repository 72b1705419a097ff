"""Applies the scales of 8-bit tensors in Hopper's prefill to scores, weights and outputs.

Scales per tensor or head, and the power of two of fp16 queries, join the softmax scale and the factor of the output.
Scales of K's tokens multiply columns of the scores; those of V's tokens multiply weights before they are rounded. With
8-bit products, a scale belongs to a block of 64 or 128 tokens: a warpgroup's queries are in one block, so its scale
joins the softmax scale, and a key tile is in one or two, whose scales multiply its scores. With 16-bit tensors every
function returns what it was given and compiles to nothing. convert.py makes the operands.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....pieces.modifiers import folds_scale
from ....pieces.scales import LEAST_SCALE, has_row_scale, has_scale, has_token_scale, head_scale, scaled_rows
from ....pieces.softmax import as_quads, from_quads
from ...layouts import accumulator_layout
from .sizes import WARP_TOPS

ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # one number in every thread of a warpgroup
ALL = gl.constexpr(gl.BlockedLayout([WARP_TOPS], [32], [4], [0]))  # all of the warps' numbers in every thread
TOPS = gl.constexpr(WARP_TOPS)


@gluon.jit
def of_tile(ctx, tile, q_state, wg):
    """The context whose softmax scale includes the scales of a tile's keys and queries, and the power of two of its
    queries."""
    config: gl.constexpr = ctx.config
    scale = ctx.scale
    if has_scale(config, "k", "tensor", "head"):
        scale *= head_scale(ctx.scales.k, tile.h // ctx.work.group)
    if has_scale(config, "q", "tensor", "head"):
        scale *= head_scale(ctx.scales.q, tile.h)
    if config.products and scaled_rows(config, "q") > 0:
        first = gl.minimum(tile.row + wg * config.wg_tokens, ctx.work.lengths(tile).seq_q - 1)
        scale *= row_block_scale(ctx.scales.q, ctx.work.query_place(tile, first), tile.h, scaled_rows(config, "q"))
    if config.query_factors == TOPS:
        exponent = fraction_exponent(largest_of_warps(factors_of(ctx, q_state, wg)))
        scale *= ((exponent - 15) << 23).to(gl.float32, bitcast=True)
    if config.eight_bit is None:
        return ctx
    elif folds_scale(ctx.mods.score):  # calls with a scale of 0 or below have a score function
        return ctx.with_scale(gl.maximum(scale, LEAST_SCALE))
    else:
        return ctx.with_scale(scale)


@gluon.jit
def factors_of(ctx, q_state, wg):
    """The slot's `query_factors` of a warpgroup in shared memory: its warps' largest queries, or its rows' scales."""
    return ctx.rings.factors.index(q_state.index * ctx.config.consumers + wg)


@gluon.jit
def largest_of_warps(tops):
    """The largest of the non-negative numbers that warps have stored, as fp32 bits."""
    return gl.max(tops.load(ALL).to(gl.int32, bitcast=True), 0)


@gluon.jit
def fraction_exponent(top):
    """Biased exponent of the power of two for a warpgroup whose largest query has the fp32 bits `top`."""
    return gl.maximum(top >> 23, 16)


@gluon.jit
def row_block_scale(rows, place, head, shared: gl.constexpr):
    """Loads the scale of the block of `shared` tokens with `place` (batch entry, token)."""
    outer, row = place
    return gl.load(rows.scale + (outer * rows.outer + row // shared * rows.row + head * rows.head))


@gluon.jit
def key_block_scales(ctx, tile, key_tile):
    """Loads the scales of a tile's one or two blocks of keys, with 8-bit products; else (). Called before the scores
    are awaited, because nothing else hides the load."""
    config: gl.constexpr = ctx.config
    shared: gl.constexpr = scaled_rows(config, "k") if config.products else 0
    if shared == 0:
        return ()
    else:
        first, head = key_tile * config.block_n, tile.h // ctx.work.group
        scale = row_block_scale(ctx.scales.k, ctx.tensors.k.place(ctx, tile, first), head, shared)
        if shared >= config.block_n:
            return (scale,)
        else:
            second = gl.minimum(first + shared, ctx.work.lengths(tile).seq_k - 1)
            return scale, row_block_scale(ctx.scales.k, ctx.tensors.k.place(ctx, tile, second), head, shared)


@gluon.jit
def scaled_scores(ctx, s, of_blocks, k_state, q_state, wg):
    """Multiplies scores [64, N] by scales of tokens, or of blocks of them, if any."""
    layout: gl.constexpr = s.type.layout
    if ctx.config.products:
        if len(of_blocks) == 1:
            s *= of_blocks[0]
        elif len(of_blocks) == 2:
            left, right = s.reshape([s.shape[0], 2, s.shape[1] // 2]).permute((0, 2, 1)).split()
            joined = gl.join(left * of_blocks[0], right * of_blocks[1]).permute((0, 2, 1)).reshape(s.shape)
            s = gl.convert_layout(joined, layout, assert_trivial=True)
    else:
        if has_row_scale(ctx.config, "q"):
            s *= factors_of(ctx, q_state, wg).load(gl.SliceLayout(1, layout))[:, None]
        if has_token_scale(ctx.config, "k"):
            s *= slot_scales(ctx, ctx.rings.scales.k, k_state)
    return s


@gluon.jit
def scaled_weights(ctx, p, s, k_state):
    """Multiplies weights [64, N/8, 4, 2] by the scales of V's tokens, if any; `s` [64, N] gives the layout."""
    if has_row_scale(ctx.config, "v"):
        return as_quads(from_quads(p, s) * slot_scales(ctx, ctx.rings.scales.v, k_state))
    else:
        return p


@gluon.jit
def slot_scales(ctx, scales, k_state):
    """Loads the scales [1, N] of a slot from [stages, N]."""
    layout: gl.constexpr = gl.SliceLayout(0, accumulator_layout(ctx.config.block_n))
    return scales.index(k_state.index).load(layout)[None, :]


@gluon.jit
def scaled_factor(ctx, factor, tile):
    """Multiplies the factor of a tile's output by V's scale, if any."""
    if has_scale(ctx.config, "v", "tensor", "head"):
        return factor * head_scale(ctx.scales.v, tile.h // ctx.work.group)
    else:
        return factor
