"""One tile of rows against its keys: the loop over key tiles.

      Q in registers ─▶ S = Q·Kᵀ ─▶ score, mask ─▶ online softmax ─▶ O += P·V ─▶ O and LSE to DRAM
                          ▲ K                                          ▲ V
                          └───────────── feed: one of three kinds of buffers (feed.py) ─┘
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..pieces.modifiers import exponent_scale
from .epilogue import store_output
from .feed import make_feed, visit_of
from .layouts import product_layout, scores_operand
from .recompute import attend_again, nonfinite_rows
from .scales import first_scales, next_scales, scaled
from .softmax import softmax_start, softmax_step
from .visible import visible_scores
from .work_tile import keys_of, kv_sources, load_queries, tile_rows


@gluon.jit
def attend(ctx, work):
    """Does one tile of rows against its partition of the keys."""
    config: gl.constexpr = ctx.config
    layout: gl.constexpr = product_layout(config)
    q = load_queries(ctx.tensors, ctx.shape, work, tile_rows(scores_operand(config, 0), config), config, ctx.traits)
    span, first, last, end = keys_of(ctx, work)
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
    if len(ctx.keeps) == 0:
        store_output(ctx, o, state, work, 0)
    else:
        spoiled = nonfinite_rows(o, config.waves)
        if spoiled > 0:
            attend_again(ctx, spoiled)
        else:
            store_output(ctx, o, state, work, 0)
