"""Pair-CTA: Blackwell prefill with two CTAs that share K and V, two query tiles of 128 rows in each; off by default.

      load warp        each CTA its rows of Q and K and its columns of V             (prefill_2cta/roles.py)
      MMA warp         the leader's: products of 256 rows over both CTAs             (prefill_2cta/roles.py)
      softmax 0, 1     each CTA its rows: S ──▶ P; at the end O ──▶ memory           (prefill_2cta/softmax.py)
      correction       each CTA its rows: O *= scale                                 (prefill_2cta/softmax.py)

Each CTA loads and holds half of K and V, so their rings are twice as deep and shared memory is read half as often.
Dense batches. The specification's authors measured pairs as slower than single CTAs, so no plan chooses them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import fence_async_shared

from ...pieces.modifiers import Modifiers
from ...pieces.scheduler import Tile
from ...pieces.span import tile_span
from ..global_rows import BatchRows
from ..prefill_2q.context import Sources, Work
from .context import Context, make_barriers, make_memory, make_rings
from .roles import load_role, mma_role
from .softmax import correction_role, softmax_0, softmax_1

SOFTMAX_REGISTERS = gl.constexpr(192)
ISSUE_REGISTERS = gl.constexpr(40)


@gluon.jit
def mha_pair_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    lse_ptr,
    sinks_ptr,
    scale,
    shape,
    mask_args,
    score_args,
    config: gl.constexpr,
    functions: gl.constexpr,
    traits: gl.constexpr,
):
    """Attention forward of a dense problem by clusters of two CTAs.

    `shape` is (seq_q, seq_k, heads_q, query tiles); `functions` is (keep, span, score), see `Modifiers`. Grid, in
    clusters: (query tiles of a pair, key heads if the config fuses heads else query heads, batch).
    """
    head = gl.program_id(1) * config.tile_heads
    b = gl.program_id(2)
    tile = Tile(b, head, (shape[3] - 1 - gl.program_id(0)) * config.PairBM_eff)
    work = Work(shape[0], shape[1], shape[2], head // traits.group)
    mods = Modifiers(functions[0], functions[1], functions[2], mask_args, score_args)
    span = tile_span(mods.key_span(tile, work, config.PairBM_eff), config.BN)
    lse = lse_ptr + (b * shape[2]).to(gl.int64) * shape[0]
    q, k, v, o = BatchRows(q_desc, b), BatchRows(k_desc, b), BatchRows(v_desc, b), BatchRows(o_desc, b)
    sources = Sources(q, k, v, o, lse, shape[0], sinks_ptr)
    memory = make_memory(config)
    k_ring, v_ring = make_rings(config)
    ctx = Context(
        sources, memory, k_ring, v_ring, make_barriers(), work, tile, span, mods, scale, config, traits.has_sinks,
        traits.has_lse,
    )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize(
        [
            (correction_role, (ctx,)),
            (softmax_0, (ctx,)),
            (softmax_1, (ctx,)),
            (mma_role, (ctx,)),
            (load_role, (ctx,)),
        ],
        [4, 4, 1, 1],
        [SOFTMAX_REGISTERS, SOFTMAX_REGISTERS, ISSUE_REGISTERS, ISSUE_REGISTERS],
    )
