"""SM100MHA2Q: Blackwell prefill with two query tiles of 128 rows a CTA, as roles of a warp-specialised kernel.

      load warp        Q, K, V by TMA ──▶ shared memory                              (load.py)
      MMA warp         S = Q·K, O += P·V in tensor memory                            (mma.py)
      softmax 0, 1     S ──▶ P, each for one query tile; at the end O ──▶ memory     (softmax.py, epilogue.py)
      correction       O *= scale where the softmax's reference moved                (correction.py)

One tile a CTA (a transient schedule): the grid is (query tiles, heads, batch). Under a mask the last query tiles have
the most keys, so they start first.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import fence_async_shared

from ...pieces.modifiers import Modifiers
from ...pieces.scheduler import Tile
from ...pieces.span import tile_span
from ..global_rows import BatchRows, paged_keys, sequence_rows
from ..sync import first_grid_index
from .context import Context, Sources, Work, make_barriers, make_memory, make_rings
from .correction import correction_role
from .load import load_role
from .mma import mma_role
from .softmax import softmax_0, softmax_1

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
    places,
    mask_args,
    score_args,
    config: gl.constexpr,
    functions: gl.constexpr,
    traits: gl.constexpr,
):
    """Attention forward.

    `shape` is (seq_q, seq_k, heads_q, query tiles), lengths in total for ragged batches; `places` says where sequences
    lie, see `find_sources`; `functions` is (keep, span, score), see `Modifiers`. Grid: (query tiles, key heads if the
    config fuses heads else query heads, batch).
    """
    head = gl.program_id(1) * config.tile_heads
    tile = Tile(gl.program_id(2), head, (shape[3] - 1 - first_grid_index()) * config.BM_eff)
    descs = (q_desc, k_desc, v_desc, o_desc)
    sources, seq_q, seq_k = find_sources(descs, lse_ptr, sinks_ptr, shape, places, tile.b, config, traits)
    work = Work(seq_q, seq_k, shape[2], head // traits.group)
    mods = Modifiers(functions[0], functions[1], functions[2], mask_args, score_args)
    span = tile_span(mods.key_span(tile, work, config.BM_eff), config.BN)
    tiles = span.total
    if traits.kind == "ragged":
        tiles = gl.where(tile.row < seq_q, tiles, 0)
    memory = make_memory(config)
    k, v = make_rings(config)
    ctx = Context(
        sources, memory, k, v, make_barriers(), work, tile, span, tiles, mods, scale, config, traits.has_sinks,
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


@gluon.jit
def find_sources(
    descs, lse_ptr, sinks_ptr, shape, places, b, config: gl.constexpr, traits: gl.constexpr
):
    """(operands of sequence `b`, its queries, its keys).

    `places` is () for dense batches; (cu_q, cu_k, steps and units of q, k, v, o) for ragged ones, see clipped_rows.py;
    (lengths, table, table stride, pages, steps and units of k, v) for paged ones; where rows are copied one by one,
    `descs` has addresses of k and v, and strides of page, row and head and a head's size stand for steps and units.
    """
    q, k, v, o = descs
    lse = lse_ptr
    if traits.kind == "ragged":
        q_start = gl.load(places[0] + b)
        k_start = gl.load(places[1] + b)
        seq_q = gl.load(places[0] + b + 1) - q_start
        seq_k = gl.load(places[1] + b + 1) - k_start
        q = sequence_rows(q, q_start, seq_q, places[2], places[3])
        k = sequence_rows(k, k_start, seq_k, places[4], places[5])
        v = sequence_rows(v, k_start, seq_k, places[6], places[7])
        o = sequence_rows(o, q_start, seq_q, places[8], places[9])
        return Sources(q, k, v, o, lse + q_start, shape[0], sinks_ptr), seq_q, seq_k
    else:
        lse = lse + (b * shape[2]).to(gl.int64) * shape[0]
        q = BatchRows(q, b)
        o = BatchRows(o, b)
        seq_k = shape[1]
        if traits.kind == "paged":
            k, v, seq_k = paged_keys(k, v, places, b, config)
        else:
            k = BatchRows(k, b)
            v = BatchRows(v, b)
        return Sources(q, k, v, o, lse, shape[0], sinks_ptr), shape[0], seq_k
