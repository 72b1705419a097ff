"""SM100MHA2Q: Blackwell prefill with two query tiles of 128 rows a CTA, as roles of a warp-specialised kernel.

      load warp        Q, K, V by TMA ──▶ shared memory                              (load_warp.py)
      MMA warp         S = Q·K, O += P·V in tensor memory                            (mma_warp.py)
      softmax 0, 1     S ──▶ P, each for one query tile; at the end O ──▶ memory     (softmax_warp.py, epilogue.py)
      correction       O *= scale where the softmax's reference moved                (correction_warp.py)

One tile a CTA (a transient schedule): the grid is (query tiles, heads, batch). Under a mask the last query tiles have
the most keys, so they start first.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import fence_async_shared

from ..pieces.apply import Modifiers
from ..pieces.span import tile_span
from ..pieces.tiles import Tile
from .context import Context, Tensors, Work, make_barriers, make_memory, make_rings
from .correction_warp import correction_role
from .load_warp import load_role
from .mma_warp import mma_role
from .softmax_warp import softmax_0, softmax_1

SOFTMAX_REGISTERS = gl.constexpr(192)
CORRECTION_REGISTERS = gl.constexpr(88)
ISSUE_REGISTERS = gl.constexpr(40)


@gluon.jit
def mha_2q_kernel(
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
    has_sinks: gl.constexpr,
    has_lse: gl.constexpr,
    group: gl.constexpr,
):
    """Attention forward of a dense problem.

    `shape` is (seq_q, seq_k, heads_q, query tiles); `functions` is (keep, span, score), see `Modifiers`; `group` query
    heads share a key head. Grid: (query tiles, key heads if the config fuses heads else query heads, batch).
    """
    heads: gl.constexpr = config.group if config.fuse_gqa else 1
    row = (shape[3] - 1 - gl.program_id(0)) * config.BM_eff
    head = gl.program_id(1) * heads
    tile = Tile(gl.program_id(2), head, row)
    work = Work(shape[0], shape[1], shape[2], head // group)
    mods = Modifiers(functions[0], functions[1], functions[2], mask_args, score_args)
    span = tile_span(mods.key_span(tile, work, config.BM_eff), config.BN)
    tensors = Tensors(q_desc, k_desc, v_desc, o_desc, lse_ptr, sinks_ptr)
    memory = make_memory(config)
    k, v = make_rings(config)
    bars = make_barriers()
    ctx = Context(tensors, memory, k, v, bars, work, tile, span, span.total, mods, scale, config, has_sinks, has_lse)
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
