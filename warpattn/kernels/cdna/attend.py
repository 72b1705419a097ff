"""One tile of rows against its keys: the loop over key tiles.

      Q in registers ─▶ S = Q·Kᵀ ─▶ score, mask ─▶ online softmax ─▶ O += P·V ─▶ O and LSE to DRAM
                          ▲ K                                          ▲ V
                          └───────────── feed: one of three kinds of buffers (feed.py) ─┘
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..pieces.modifiers import exponent_scale
from ..pieces.scales import has_scale, output_scale
from ..pieces.span import tile_span
from .epilogue import store_output
from .feed import make_feed, visit_of
from .layouts import product_layout, scores_operand
from .recompute import any_nonfinite, recompute_output
from .scales import first_scales, next_scales, scaled
from .softmax import softmax_start, softmax_step
from .visible import visible_scores
from .work_tile import kv_sources, load_queries


@gluon.jit
def attend(ctx, work):
    """One tile of rows against its partition of the keys."""
    config: gl.constexpr = ctx.config
    layout: gl.constexpr = product_layout(config)
    q = load_queries(ctx.tensors, ctx.shape, work, scores_operand(config, 0), config, ctx.traits)
    keys = ctx.mods.key_span(work.rows, work.lengths, config.block_m // config.pack)
    span, end = tile_span(keys, config.block_n), gl.minimum(keys[3], work.lengths.seq_k)
    first, last = partition_of(ctx, gl.where(keys[0] < end, span.total, 0))
    k_source, v_source, rope_source = kv_sources(ctx.tensors, ctx.shape, work, ctx.scales, end, config, ctx.traits)
    feed = make_feed(k_source, v_source, rope_source, config)
    state = softmax_start(config.block_m, layout)
    o = gl.zeros([config.block_m, config.padded_v], gl.float32, layout)
    stage = feed.start(span, first)
    scales = first_scales(ctx, work, feed, span, first)
    for i in range(first, last):
        visit = visit_of(span, i, work.lengths.seq_k, config)
        s, stage = feed.scores(q, visit, stage, scales.k)
        s = visible_scores(ctx, scaled(s, scales.k, "k", config), work, visit.key, i < span.masked)
        state, p, alpha = softmax_step(state, s, exponent_scale(ctx))
        p = scaled(p, scales.v, "v", config)
        scales = next_scales(ctx, work, feed, visit, scales)
        o, stage = feed.values(p, o * alpha[:, None], visit, stage)
    feed.finish()
    if recomputes(config, len(ctx.keeps), len(ctx.mods.mask_args)):
        if any_nonfinite(o):
            o = recompute_output(ctx, work, q, feed, state, span, (first, last))
    if has_scale(config, "v", "tensor", "head"):
        o = o * output_scale(ctx.scales, work.kv_head, config)
    store_output(ctx, o, state, work, exponent_scale(ctx))


@gluon.constexpr_function
def recomputes(config, conditions, tensors):
    """Whether a tile that met NaN is computed again: under a mask of so many conditions, which reads so many tensors.
    One of indices alone hides keys from some rows only, or at a window's edge: too little to pay for."""
    return tensors > 0 or (conditions > 0 and config.recomputes_freely)


@gluon.jit
def partition_of(ctx, total):
    """(first, last) of the `total` tiles that rows see of which this workgroup visits its share."""
    if ctx.traits.partial:
        each = (total + ctx.shape.partitions - 1) // ctx.shape.partitions
        first = gl.minimum(gl.program_id(1) * each, total)
        return first, gl.minimum(first + each, total)
    else:
        return gl.to_tensor(0), total
