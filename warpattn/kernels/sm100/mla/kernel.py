"""Blackwell decode of latent attention: 64 rows, tokens × heads of a group, against their part of the keys.

      load warp     key tiles [latent 512 | rotary 64] by TMA ──▶ ring of two slots          (load.py)
      convert       latents of 8 bits ──▶ of 16, times their scales, where they have 8       (convert.py)
      MMA warp      S = Q·Kᵀ,  O += P·latents, in tensor memory                              (mma.py)
      attend        queries ──▶ shared memory;  S ──▶ P;  O rescaled where the maximum moved;
                    at the end O ──▶ output, or a part of it ──▶ workspace                   (attend.py, epilogue.py)

Each tile of latents is read once, as keys and as values. While the MMA warp has O += P·V of one tile, the attend
warpgroup is at the scores of the next. That a tile takes longer to arrive than to go through that chain is an estimate;
no card has run it. With `splitk_partitions` another kernel combines the parts (nvidia/combine_parts.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import fence_async_shared

from ...nvidia.latent_queries import LatentQueries
from ...nvidia.strided import Strided
from ...pieces.modifiers import modifiers
from ...pieces.scales import OfTokens, softmax_scale
from ...pieces.scheduler_split import partition_tiles
from ...pieces.span import tile_span
from ..global_rows import key_sources, query_extent, seen_values
from ..sync import first_grid_index
from ..token_scales import make_slots
from .attend import attend_role
from .context import LatentContext, LatentRows, Lengths, make_barriers, make_memory, make_ring, make_staged
from .convert import SLOTS, convert_role, load_stored
from .load import load_role
from .mma import mma_role


@gluon.jit
def latent_kernel(
    q, k_desc, v_desc, out, lse, sinks_ptr, scale, shape, sequence_args, recompute_args, mask_args,
    score_args, config: gl.constexpr, functions: gl.constexpr, traits: gl.constexpr,
):  # fmt: skip
    """Attention of a few query tokens with head dims 576 and 512.

    q, out: `StridedArgs`, q perhaps a `LatentQueryArgs`, strides in units of 8 elements; lse: the same in elements.
    shape: `Lengths`. sequence_args: see sequence_args.py. recompute_args: `KeyAddresses`, or nothing where a mask hides
    nothing. Grid: (row tiles * partitions, key heads, batch).
    """
    partitions: gl.constexpr = config.splitk_partitions
    index = first_grid_index()
    tile = index // partitions
    partition = index - tile * partitions
    b = gl.program_id(2)
    group = gl.to_tensor(traits.group)
    rows = LatentRows(b, tile * config.BM, group, gl.program_id(1))
    q, out, lse, out_batch, seq_q = sequence_rows(
        latent_queries(q, config), strided(out, 8), strided(lse, 1), shape.seq_q, sequence_args, b, partition, traits
    )
    k, v, seq_k = key_sources(k_desc, v_desc, shape.seq_k, sequence_args, b, config, traits)
    lengths = Lengths(seq_q, seq_k)
    mods = modifiers(functions, mask_args, score_args)
    span = row_span(rows, lengths, mods, config)
    v = seen_values(v, span, seq_k, mods, sequence_args)
    run = partition_tiles(tile_span(span, config.BN), partition, partitions, has_scores(rows, lengths, traits))
    ctx = LatentContext(
        q, out, lse, out_batch, sinks_ptr, k, v,
        make_ring(config), make_staged(config, 2), OfTokens((), make_slots(config, "v", SLOTS)), make_memory(config),
        make_barriers(config), rows, lengths, run, mods, softmax_scale(scale, config), scale, config, traits,
    )  # fmt: skip
    fence_async_shared()
    workers: gl.constexpr = config.topology.workers
    gl.warp_specialize(
        [(attend_role, (ctx, recompute_args)), (mma_role, (ctx,))]
        + ([(load_role, (ctx,))] if config.eight_bit is None else [(load_stored, (ctx,)), (convert_role, (ctx,))]),
        workers.warps,
        workers.registers,
    )


@gluon.jit
def latent_queries(q, config: gl.constexpr):
    """Of a `LatentQueryArgs`, or of a `StridedArgs` that has both."""
    if config.own_rope:
        return LatentQueries(strided(q.latent, 8), strided(q.rope, 8), 0)
    else:
        return LatentQueries(strided(q, 8), strided(q, 8), config.dim_v)


@gluon.jit
def has_scores(rows, lengths, traits: gl.constexpr):
    """Whether there are queries and keys for this CTA."""
    if traits.ragged_queries:
        return (lengths.seq_k > 0) & (rows.first < lengths.seq_q * traits.group)
    else:
        return lengths.seq_k > 0


@gluon.jit
def sequence_rows(q, out, lse, seq_q, x, b, partition, traits: gl.constexpr):
    """(queries, output, LSE, the output's batch, number of queries) of sequence `b`; parts are batches of their own,
    and sequences that are laid end to end are one. `x`: the arguments of the sequence kind."""
    out_batch = partition * gl.num_programs(2) + b
    if traits.ragged_queries:
        out_batch = partition
        first, seq_q = query_extent(x, b, traits)
        q, out, lse = q.after(first), out.after(first), lse.after(first)
    return q, out, lse, out_batch, seq_q


@gluon.jit
def strided(x, unit: gl.constexpr):
    """The array of a `StridedArgs`."""
    return Strided(x.pointer, x.batch, x.token, x.head, unit)


@gluon.jit
def row_span(rows, lengths, mods, config: gl.constexpr):
    """The interval of keys that the rows of this CTA may see."""
    offset = lengths.seq_k - lengths.seq_q
    q_lo = rows.first // rows.group + offset
    q_hi = gl.minimum((rows.first + config.BM - 1) // rows.group, lengths.seq_q - 1) + offset
    return mods.span(rows.b, 0, q_lo, q_hi, lengths.seq_q, lengths.seq_k, mods.mask_args)
