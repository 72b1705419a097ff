"""Entry of the Blackwell prefill kernels: two query tiles a CTA, one query tile, and pairs of CTAs.

The config says which: each folder's `kernel.py` starts the roles of its own. One tile a CTA (a transient schedule).
Under a mask the last query tiles have the most keys, so they start first.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import fence_async_shared

from ..pieces.modifiers import modifiers
from ..pieces.scales import OfTokens, softmax_scale
from ..pieces.scheduler import Tile
from ..pieces.scheduler_split import partition_tiles
from ..pieces.span import tile_span
from .global_rows import BatchRows, Sources, key_sources, query_extent, seen_values, sequence_rows
from .prefill_1q.kernel import start_1q
from .prefill_2cta.kernel import start_pair
from .prefill_2q.context import Context, Work, make_barriers, make_memory, make_rings, make_staged
from .prefill_2q.kernel import start_2q
from .prefill_2q.recompute import recompute_tiles
from .sync import first_grid_index
from .token_scales import make_slots


@gluon.jit
def prefill_kernel(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, sinks_ptr, scale, shape, sequence_args, recompute_args, mask_args,
    score_args, config: gl.constexpr, functions: gl.constexpr, traits: gl.constexpr,
):  # fmt: skip
    """Attention forward, or one part of the keys of it.

    `shape` is a `Shape` and `sequence_args` one of the classes of sequence_args.py; `recompute_args` is a
    `RecomputeArgs`, or nothing where no tile is attended to again; `functions` is a `Functions`, see `Modifiers`.
    Grid, in clusters: (query tiles * partitions, key heads if the config fuses heads else query heads, batch). With
    partitions `o_desc` and `lse_ptr` are the workspace's, see combine.py.
    """
    partitions: gl.constexpr = config.splitk_partitions
    index = cluster_index(config)
    number = index // partitions
    partition = index - number * partitions
    head = gl.program_id(1) * config.tile_heads
    tile = Tile(gl.program_id(2), head, (shape.tiles - 1 - number) * config.PairBM_eff)
    sources = Sources(q_desc, k_desc, v_desc, o_desc, lse_ptr, shape.seq_q, sinks_ptr)
    sources, seq_q, seq_k = at_sequence(sources, shape, sequence_args, tile.b, config, traits)
    if partitions > 1:
        sources = at_part(sources, o_desc, lse_ptr, shape, sequence_args, partition, tile.b, traits)
    work = Work(seq_q, seq_k, shape.heads_q, head // traits.group)
    mods = modifiers(functions, mask_args, score_args)
    span = mods.key_span(tile, work, config.PairBM_eff)
    sources = gl.aggregate_replace(sources, v=seen_values(sources.v, span, seq_k, mods, sequence_args))
    run = tile_span(span, config.BN)
    if config.num_q == 1:
        run = partition_tiles(run, partition, partitions, tile.row < seq_q)
    elif traits.ragged_queries:
        run = gl.aggregate_replace(run, total=gl.where(tile.row < seq_q, run.total, 0))
    memory = make_memory(config)
    k, v = make_rings(config)
    scores = softmax_scale(scale, config)
    token_scales = OfTokens(make_slots(config, "k"), make_slots(config, "v"))
    staged, bars = make_staged(config), make_barriers(config)
    ctx = Context(
        sources, memory, k, v, staged, token_scales, bars, work, tile, run, mods, scores, scale, config, traits,
        len(recompute_args) > 0,
    )  # fmt: skip
    workers: gl.constexpr = config.topology.workers
    fence_async_shared()
    if config.num_q == 1:
        start_1q(ctx, workers)
    elif config.pair_cta:
        start_pair(ctx, workers)
    else:
        start_2q(ctx, workers)
    if len(recompute_args) > 0:
        recompute_tiles(ctx, recompute_args)


@gluon.jit
def cluster_index(config: gl.constexpr):
    """Number of this CTA, or of its pair, in the first dimension of the grid."""
    if config.pair_cta:
        return gl.program_id(0)
    else:
        return first_grid_index()


@gluon.jit
def at_sequence(tensors, shape, sequence_args, b, config: gl.constexpr, traits: gl.constexpr):
    """(operands of sequence `b`, its queries, its keys); `tensors`: descriptors, or addresses of k and v whose rows are
    copied one by one."""
    x = sequence_args
    k, v, seq_k = key_sources(tensors.k, tensors.v, shape.seq_k, x, b, config, traits)
    if traits.ragged_queries:
        start, seq_q = query_extent(x, b, traits)
        q, o = sequence_rows(tensors.q, start, seq_q, x.q), sequence_rows(tensors.o, start, seq_q, x.o)
        return Sources(q, k, v, o, tensors.lse + start, tensors.lse_stride, tensors.sinks), seq_q, seq_k
    else:
        q, o = BatchRows(tensors.q, b), BatchRows(tensors.o, b)
        lse = tensors.lse + (b * shape.heads_q).to(gl.int64) * shape.seq_q
        return Sources(q, k, v, o, lse, tensors.lse_stride, tensors.sinks), shape.seq_q, seq_k


@gluon.jit
def at_part(sources, o_desc, lse_ptr, shape, sequence_args, partition, b, traits: gl.constexpr):
    """The operands with the rows of a part in the workspace as output: each part is a batch of its own."""
    if traits.ragged_queries:
        first, seq_q = query_extent(sequence_args, b, traits)
        start = partition * shape.seq_q + first
        o = sequence_rows(o_desc, start, seq_q, sequence_args.o)
    else:
        batch = partition * gl.num_programs(2) + b
        start = batch * shape.seq_q
        o = BatchRows(o_desc, batch)
    return gl.aggregate_replace(sources, o=o, lse=lse_ptr + start.to(gl.int64) * shape.heads_q)
