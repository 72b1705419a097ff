"""Scales of 8-bit tensors in Hopper's prefill: where scores, weights and outputs are multiplied by them.

Scales per tensor and head, and the power of two of queries in fp16, become part of the softmax scale and of the factor
of the output. Those of tokens multiply columns of the scores, and weights before they are rounded. Beside products of
8 bits a block of 64 or 128 queries has all rows of a warpgroup, so that its scale joins the softmax scale, too, and
those of blocks of keys, one or two in a tile, multiply its scores. With 16 bits in memory every function returns what
it was given, and no instruction is left. convert.py makes the operands.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....pieces.modifiers import folds_scale
from ....pieces.scales import LEAST_SCALE, has_row_scale, has_scale, has_token_scale, head_scale, scaled_rows
from ....pieces.softmax import as_quads, from_quads
from ...layouts import accumulator_layout

ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # one number in every thread of a warpgroup


@gluon.jit
def of_tile(ctx, tile, q_state, wg):
    """The context with the scales of a tile's keys and queries, and the power of these, as part of the softmax
    scale."""
    config: gl.constexpr = ctx.config
    scale = ctx.scale
    if has_scale(config, "k", "tensor", "head"):
        scale *= head_scale(ctx.scales.k, tile.h // ctx.work.group)
    if has_scale(config, "q", "tensor", "head"):
        scale *= head_scale(ctx.scales.q, tile.h)
    if config.products and scaled_rows(config, "q") > 0:
        first = gl.minimum(tile.row + wg * config.wg_tokens, ctx.work.lengths(tile).seq_q - 1)
        scale *= row_block_scale(ctx.scales.q, ctx.work.query_place(tile, first), tile.h, scaled_rows(config, "q"))
    if config.query_factors == 1:
        scale *= gl.max(factors_of(ctx, q_state, wg).load(ONE), 0)
    if config.eight_bit is None:
        return ctx
    elif folds_scale(ctx.mods.score):  # a scale of 0 or below has a score function
        return ctx.with_scale(gl.maximum(scale, LEAST_SCALE))
    else:
        return ctx.with_scale(scale)


@gluon.jit
def factors_of(ctx, q_state, wg):
    """Factors of a warpgroup's scores, of a slot of queries: a power of two, or scales of all rows."""
    return ctx.rings.factors.index(q_state.index * ctx.config.consumers + wg)


@gluon.jit
def row_block_scale(rows, place, head, shared: gl.constexpr):
    """The scale of a head's block of `shared` tokens with the one at (batch entry, token) `place`."""
    outer, row = place
    return gl.load(rows.scale + (outer * rows.outer + row // shared * rows.row + head * rows.head))


@gluon.jit
def key_block_scales(ctx, tile, key_tile):
    """The scales of the one or two blocks of keys of a tile beside products of 8 bits, () elsewhere. Loaded before the
    scores are there: nothing else hides the load."""
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
    """Scores [64, N] times their keys' and queries' scales, where tokens or blocks of them have some."""
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
    """Weights [64, N/8, 4, 2] times their values' scales, where tokens have some; `s` [64, N]."""
    if has_row_scale(ctx.config, "v"):
        return as_quads(from_quads(p, s) * slot_scales(ctx, ctx.rings.scales.v, k_state))
    else:
        return p


@gluon.jit
def slot_scales(ctx, scales, k_state):
    """Scales [1, N] of a slot of [stages, N]."""
    layout: gl.constexpr = gl.SliceLayout(0, accumulator_layout(ctx.config.block_n))
    return scales.index(k_state.index).load(layout)[None, :]


@gluon.jit
def scaled_factor(ctx, factor, tile):
    """The factor of a tile's output, times the scale of its values."""
    if has_scale(ctx.config, "v", "tensor", "head"):
        return factor * head_scale(ctx.scales.v, tile.h // ctx.work.group)
    else:
        return factor
