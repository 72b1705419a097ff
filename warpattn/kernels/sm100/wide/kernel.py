"""Blackwell attention with head dims above 128: 128 or 64 rows, tokens × heads of a group, against their keys.

      load warp     K0, K1, V0, K2, V1, … by TMA ──▶ ring of four slots                      (load.py)
      convert       tiles of 8 bits ──▶ of 16, in the same order, where they have 8          (convert.py)
      MMA warp      S = Q·Kᵀ,  O += P·V, in tensor memory                                    (mma.py)
      attend        queries ──▶ shared memory;  S ──▶ P;  O rescaled where the maximum moved;
                    at the end O ──▶ output, or a part of it ──▶ workspace                   (mla/attend.py)

Rows, scores and output are those of latent attention (mla/), whose values are part of its keys. No card has run it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import fence_async_shared

from ...pieces.modifiers import modifiers
from ...pieces.scales import OfTokens, softmax_scale
from ...pieces.scheduler_split import partition_tiles
from ...pieces.span import tile_span
from ..global_rows import key_sources, seen_values
from ..mla.attend import attend_role
from ..mla.context import LatentContext, LatentRows, Lengths, make_barriers, make_staged
from ..mla.kernel import row_span, sequence_rows, strided
from ..sync import first_grid_index
from ..token_scales import make_slots
from .context import make_memory, make_ring
from .convert import convert_role
from .load import load_role
from .mma import mma_role


@gluon.jit
def wide_kernel(
    q, k_desc, v_desc, out, lse, sinks_ptr, scale, shape, sequence_args, recompute_args, mask_args,
    score_args, config: gl.constexpr, functions: gl.constexpr, traits: gl.constexpr,
):  # fmt: skip
    """Attention with head dims from 129 to 512. Arguments as in `latent_kernel`; sequences may be ragged. Grid: (row
    tiles * partitions, key heads, batch)."""
    partitions: gl.constexpr = config.splitk_partitions
    index = first_grid_index()
    tile = index // partitions
    partition = index - tile * partitions
    b = gl.program_id(2)
    rows = LatentRows(b, tile * config.BM, gl.to_tensor(traits.group), gl.program_id(1))
    q, out, lse, out_batch, seq_q = sequence_rows(
        strided(q, 8), strided(out, 8), strided(lse, 1), shape.seq_q, sequence_args, b, partition, traits
    )
    k, v, seq_k = key_sources(k_desc, v_desc, shape.seq_k, sequence_args, b, config, traits)
    lengths = Lengths(seq_q, seq_k)
    mods = modifiers(functions, mask_args, score_args)
    span = row_span(rows, lengths, mods, config)
    v = seen_values(v, span, lengths.seq_k, mods, sequence_args)
    some = (lengths.seq_k > 0) & (rows.first < lengths.seq_q * traits.group)
    run = partition_tiles(tile_span(span, config.BN), partition, partitions, some)
    token_scales = OfTokens(make_slots(config, "k"), make_slots(config, "v"))
    ctx = LatentContext(
        q, out, lse, out_batch, sinks_ptr, k, v, make_ring(config), make_staged(config, config.blocks), token_scales,
        make_memory(config), make_barriers(config), rows, lengths, run, mods, softmax_scale(scale, config), scale,
        config, traits,
    )  # fmt: skip
    fence_async_shared()
    workers: gl.constexpr = config.topology.workers
    gl.warp_specialize(
        [(attend_role, (ctx, recompute_args)), (mma_role, (ctx,)), (load_role, (ctx,))]
        + ([] if config.eight_bit is None else [(convert_role, (ctx,))]),
        workers.warps,
        workers.registers,
    )
