"""Queries and shared memory of Hopper's kernel for latent attention. Its roles get a `DecodeContext` in which `q` is a
`LatentQueries`, `keys.k` holds the rotary parts and `keys.v` the latents."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...nvidia.latent_queries import LatentQueries
from ...nvidia.pipelines import PipelineState, StagedPipeline, empty_arrivals, make_pipeline
from ..decode.context import matrix
from ..layouts import element_type, tile_layout
from ..prefill.eight_bit.rings import first_half


@gluon.jit
def latent_queries(q, config: gl.constexpr):
    """The `LatentQueries` of a `LatentQueryArgs` or `StridedRows`."""
    if config.own_rope:
        return LatentQueries(matrix(q.latent), matrix(q.rope), 0)
    else:
        return LatentQueries(matrix(q), matrix(q), config.dim_v)


@gluon.aggregate
class MlaRings:
    """Shared memory. Each half of a tile's latents has a slot of its own; P overwrites the tile's rotary part. After
    the barriers of `v` there is one more, for a tile that the producer must zero rows of before it is read. Where
    latents of 8 bits are converted in the slots, there is one for each slot, which completes when they have arrived;
    so there is in `k`, if rotary parts have 8 bits."""

    k: StagedPipeline  # [rope stages, 1, N, 1, 64], rotary parts
    v: StagedPipeline  # [stages, 1, N, 1, 256], halves of latents
    q: gl.shared_memory_descriptor  # [2, 64, 256]
    q_rope: gl.shared_memory_descriptor  # [1, 64, 64]
    factors: StagedPipeline  # [rope stages, 64, 4] fp32: rescale O to a tile's maxima; `full` also means P is there
    sums: StagedPipeline  # [2, 64, 4] fp32: an item's reference maxima, and row sums


@gluon.jit
def make_mla_rings(config: gl.constexpr):
    """Allocates shared memory, initialises barriers."""
    dtype: gl.constexpr = element_type(config.element)
    k = ring_tiles(dtype, config.rope_stages, config.block_n, config.rope)
    v = ring_tiles(dtype, config.stages, config.block_n, config.half)
    q = row_tiles(dtype, 2, config.rows, config.half)
    q_rope = row_tiles(dtype, 1, config.rows, config.rope)
    if config.latents is None:
        k_ring = make_pipeline(k, empty_arrivals(config.topology, "K"), config.rope_stages)
        v_ring = make_pipeline(v, empty_arrivals(config.topology, "V"), config.stages, more=1, arrivals_of_more=2)
    else:
        k_ring = make_converted_ring(k, config, "K", config.rope_stages, config.narrow_rope)
        v_ring = make_converted_ring(v, config, "V", config.stages, True)
    factors = make_row_ring(config, "P", config.rope_stages, 1)
    sums = make_row_ring(config, "sums", 1, 2)
    return MlaRings(k_ring, v_ring, q, q_rope, factors, sums)


@gluon.jit
def make_converted_ring(smem, config: gl.constexpr, name: gl.constexpr, stages: gl.constexpr, narrow: gl.constexpr):
    """Makes the ring of edge `name`. If its tiles are `narrow`, four warps convert and hand over each, after it has
    completed a barrier of its own (`arrived`)."""
    arrivals: gl.constexpr = empty_arrivals(config.topology, name)
    if narrow:
        return make_pipeline(smem, arrivals, stages, more=stages, fills=4)
    else:
        return make_pipeline(smem, arrivals, stages)


@gluon.jit
def make_row_ring(config: gl.constexpr, name: gl.constexpr, stages: gl.constexpr, parts: gl.constexpr):
    """Makes the ring of edge `name`, whose tiles have four fp32 numbers a row and are written by four warps."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    smem = gl.allocate_shared_memory(gl.float32, [stages * parts, config.rows, 4], plain)
    return make_pipeline(smem, empty_arrivals(config.topology, name), stages, parts, fills=4)


@gluon.aggregate
class SwapAbRings:
    """Shared memory with swap-AB; `k` and `v` are the rings of `MlaRings`."""

    k: StagedPipeline  # [rope stages, 1, N, 1, 64], rotary parts
    v: StagedPipeline  # [stages, 1, N, 1, 256], halves of latents
    q: gl.shared_memory_descriptor  # [2, R, 256]; [1, R, 512] with 8-bit latents
    q_rope: gl.shared_memory_descriptor  # [1, R, 64]
    p: gl.shared_memory_descriptor  # [1, R, N], P of a tile; with 8-bit latents [4, R, N], for blocks of 128 columns
    scales: gl.base_value  # [rope stages, 4 * N] fp32, for these blocks; () with 16-bit latents


@gluon.jit
def make_swap_ab_rings(config: gl.constexpr):
    """Allocates shared memory, initialises barriers."""
    rope: gl.constexpr = element_type(config.rope_element)
    latents: gl.constexpr = element_type(config.latent_element)
    k = ring_tiles(rope, config.rope_stages, config.block_n, config.rope)
    v = ring_tiles(latents, config.stages, config.block_n, config.half)
    operand: gl.constexpr = element_type(config.operand)
    of_rope: gl.constexpr = operand if config.narrow_rope else element_type(config.element)
    q = row_tiles(operand, config.dim_v // config.query_columns, config.rows, config.query_columns)
    q_rope = row_tiles(of_rope, 1, config.rows, config.rope)
    p = row_tiles(operand, config.weights, config.rows, config.block_n)
    scales = ()
    if config.latents is not None:
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        shape: gl.constexpr = [config.rope_stages, config.weights * config.block_n]
        scales = gl.allocate_shared_memory(gl.float32, shape, plain)
    k_ring = make_pipeline(k, empty_arrivals(config.topology, "K"), config.rope_stages)
    v_ring = make_pipeline(v, empty_arrivals(config.topology, "V"), config.stages)
    return SwapAbRings(k_ring, v_ring, q, q_rope, p, scales)


@gluon.jit
def ring_tiles(dtype: gl.constexpr, slots: gl.constexpr, rows: gl.constexpr, cols: gl.constexpr):
    """Shared memory for tiles that TMA writes, [slots, 1, rows, 1, cols]."""
    layout: gl.constexpr = tile_layout(rows, cols, dtype)
    return gl.allocate_shared_memory(dtype, [slots, 1, rows, 1, cols], layout)


@gluon.jit
def row_tiles(dtype: gl.constexpr, number: gl.constexpr, rows: gl.constexpr, cols: gl.constexpr):
    """Shared memory for tiles that wgmma reads, [number, rows, cols]."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, cols], dtype)
    return gl.allocate_shared_memory(dtype, [number, rows, cols], layout)


@gluon.aggregate
class TileSlots:
    """The ring slots of a tile: its rotary part, and the left and right half of its latents, which are neighbours."""

    rope: PipelineState
    left: PipelineState
    right: PipelineState

    @gluon.jit
    def step(self):
        """The slots of the next tile."""
        left = self.right.step()
        return TileSlots(self.rope.step(), left, left.step())


@gluon.jit
def tile_slots(config: gl.constexpr, first: gl.constexpr):
    """The slots of the first tile; `first`: `consumer_state` or `producer_state`."""
    left = first(config.stages)
    return TileSlots(first(config.rope_stages), left, left.step())


@gluon.jit
def half_tile(ctx, slot):
    """The half of latents [N, 256] in a slot."""
    return ctx.rings.v.tile(slot).reshape([ctx.config.block_n, ctx.config.half])


@gluon.jit
def arrived(ring, slot):
    """The barrier that completes when the 8-bit part of a tile has arrived in a slot."""
    return ring.bars.index(2 * ring.stages + slot.index)


@gluon.jit
def arriving(ctx, ring, slot):
    """The first half of a slot, where the 8-bit part [1, N, 1, columns] of a tile arrives."""
    return first_half(ring.tile(slot), element_type(ctx.config.latents))


@gluon.jit
def half_words(ctx, slot, dtype: gl.constexpr):
    """The half of 8-bit latents in a slot, viewed as wider integers [N, 256 bytes]."""
    shape: gl.constexpr = [ctx.config.block_n, ctx.config.half * 8 // dtype.primitive_bitwidth]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, dtype)
    return ctx.rings.v.tile(slot).reinterpret(dtype, shape, layout)


@gluon.jit
def rope_tile(ctx, slot):
    """The rotary part [N, 64] in a slot."""
    return ctx.rings.k.tile(slot).reshape([ctx.config.block_n, ctx.config.rope])
