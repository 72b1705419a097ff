"""SM100 1Q: Blackwell attention with one query tile of 128 rows a CTA, for short prompts and split keys.

The two softmax warpgroups work on the same rows. Key tiles alternate between them, even ones through S0 and O0, odd
ones through S1 and O1, so the tensor core is as busy as with two query tiles; at the end the accumulators are combined.

      load warp        Q, K, V by TMA ──▶ shared memory                              (prefill_1q/roles.py)
      MMA warp         S0, S1 = Q·K in turn, O0, O1 += P·V                           (prefill_1q/roles.py)
      softmax 0, 1     S ──▶ P of every other key tile; then the combination          (prefill_1q/softmax.py)
      correction       O *= scale where the softmax's reference moved                (prefill_1q/roles.py)

With `splitk_partitions` the key tiles of a query tile are shared out over that many CTAs (split.py), whose results
another kernel combines (sm100/combine.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import allocate_tensor_memory, fence_async_shared, mbarrier

from ...nvidia.pipelines import KVPipeline, make_kv_pipeline
from ...pieces.modifiers import Modifiers
from ...pieces.scheduler import Tile
from ...pieces.span import tile_span
from ..global_rows import BatchRows
from ..layouts import box_layout, element_type, lanes, query_box, stacked
from ..prefill_2q.context import Barriers, Memory, Sources, Work, make_barriers
from ..prefill_2q.context import make_rings as make_whole_rings
from ..prefill_2q.kernel import find_sources, first_grid_index
from ..split import TileRun, window
from .roles import correction_role, load_role, mma_role
from .softmax import softmax_0, softmax_1

SOFTMAX_REGISTERS = gl.constexpr(192)
ISSUE_REGISTERS = gl.constexpr(40)


@gluon.aggregate
class Context:
    """What every role can see, with the names that the roles' functions share with the kernel of two query tiles."""

    tensors: Sources
    memory: Memory  # q: [chunks, *query box]
    k: KVPipeline  # slots of K in chunks, or of K and V in turn
    v: KVPipeline
    bars: Barriers
    combine_bars: gl.shared_memory_descriptor  # [2, 1]: a warpgroup's maximum and sum are written
    work: Work
    tile: Tile
    span: TileRun
    mods: Modifiers
    scale: gl.tensor  # softmax scale, fp32
    config: gl.constexpr
    has_sinks: gl.constexpr
    has_lse: gl.constexpr

    @gluon.jit
    def of_warpgroup(self, wg: gl.constexpr):
        """The context with the key tiles of one softmax warpgroup."""
        return Context(
            self.tensors, self.memory, self.k, self.v, self.bars, self.combine_bars, self.work, self.tile,
            self.span.every_other(wg), self.mods, self.scale, self.config, self.has_sinks,
            self.has_lse,
        )  # fmt: skip


@gluon.jit
def make_memory(config: gl.constexpr):
    """Shared memory of Q's chunks and of the scales, and all of tensor memory."""
    dtype: gl.constexpr = element_type(config.dtype)
    box: gl.constexpr = query_box(config, config.BK0)
    q = gl.allocate_shared_memory(dtype, stacked(config.num_qk_stages, box), box_layout(box, dtype))
    scales = gl.allocate_shared_memory(gl.float32, [2, config.BM_q], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    s = allocate_tensor_memory(gl.float32, [2, config.BM_q, config.BN], lanes(config.BN))
    o = allocate_tensor_memory(gl.float32, [2, config.BM_q, config.padded_ov_depth], lanes(config.padded_ov_depth))
    return Memory(q, scales, s, o)


@gluon.jit
def make_rings(config: gl.constexpr):
    """(K ring in chunks, V ring), or the ring of both twice."""
    if config.use_shared_kv:
        return make_whole_rings(config)
    else:
        dtype: gl.constexpr = element_type(config.dtype)
        stages: gl.constexpr = config.num_kv_stages
        chunks: gl.constexpr = config.num_qk_stages
        k_box: gl.constexpr = [1, config.BN, 1, config.BK0]
        v_box: gl.constexpr = [1, config.BN, 1, config.padded_ov_depth]
        k_smem = gl.allocate_shared_memory(dtype, stacked(stages * chunks, k_box), box_layout(k_box, dtype))
        v_smem = gl.allocate_shared_memory(dtype, stacked(stages, v_box), box_layout(v_box, dtype))
        k = make_kv_pipeline(k_smem, stages, chunks)
        v = make_kv_pipeline(v_smem, stages)
        k.init()
        v.init()
        return k, v


@gluon.jit
def mha_1q_kernel(
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
    """Attention forward, or one part of the keys of it.

    Parameters are those of `mha_2q_kernel`. Grid: (query tiles * partitions, key heads if the config fuses heads else
    query heads, batch). With partitions `o_desc` and `lse_ptr` are the workspace's, see sm100/combine.py.
    """
    partitions: gl.constexpr = config.splitk_partitions
    place = first_grid_index()
    number = place // partitions
    partition = place - number * partitions
    head = gl.program_id(1) * config.tile_heads
    tile = Tile(gl.program_id(2), head, (shape[3] - 1 - number) * config.BM_eff)
    descs = (q_desc, k_desc, v_desc, o_desc)
    sources, seq_q, seq_k = find_sources(descs, lse_ptr, sinks_ptr, shape, places, tile.b, config, traits)
    if partitions > 1:
        sources = part_of(sources, o_desc, lse_ptr, partition * gl.num_programs(2) + tile.b, seq_q * shape[2])
    work = Work(seq_q, seq_k, shape[2], head // traits.group)
    mods = Modifiers(functions[0], functions[1], functions[2], mask_args, score_args)
    span = tile_span(mods.key_span(tile, work, config.BM_eff), config.BN)
    run = window(span, partition, partitions, tile.row < seq_q)
    combine_bars = mbarrier.allocate_mbarrier(batch=2)
    for wg in gl.static_range(2):
        mbarrier.init(combine_bars.index(wg), count=4)
    k, v = make_rings(config)
    ctx = Context(
        sources, make_memory(config), k, v, make_barriers(), combine_bars, work, tile, run, mods, scale, config,
        traits.has_sinks, traits.has_lse,
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
def part_of(sources, o_desc, lse_ptr, batch, rows):
    """The operands with batch `batch` of the workspace as output: parts are batches of their own, of `rows` rows."""
    o = BatchRows(o_desc, batch)
    return Sources(sources.q, sources.k, sources.v, o, lse_ptr + batch.to(gl.int64) * rows, rows, sources.sinks)
