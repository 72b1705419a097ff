"""Blackwell decode of latent attention: 64 rows, tokens × heads of a group, against their share of the keys.

      load warp     key tiles [latent 512 | rotary 64] by TMA ──▶ ring of two slots          (mla/roles.py)
      MMA warp      S = Q·Kᵀ,  O += P·latents, in tensor memory                              (mla/roles.py)
      attend        queries ──▶ shared memory;  S ──▶ P;  O rescaled where the maximum moved;
                    at the end O ──▶ output, or a part of it ──▶ workspace                   (mla/softmax.py)

Each tile of latents is read once, as keys and as values. While the MMA warp has O += P·V of one tile, the attend
warpgroup is at the scores of the next. That a tile takes longer to arrive than to go through that chain is an estimate;
no card has run it. With `splitk_partitions` another kernel combines the parts (sm100/combine.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    fence_async_shared,
    mbarrier,
    tensor_memory_descriptor,
)
from triton.language.core import base_value

from ...nvidia.pipelines import KVPipeline
from ...pieces.modifiers import Modifiers
from ...pieces.span import tile_span
from ..global_rows import BatchRows, paged_keys
from ..layouts import box_layout, element_type, stacked
from ..split import TileRun, window
from ..sync import first_grid_index
from .roles import load_role, mma_role
from .softmax import attend_role

MMA_REGISTERS = gl.constexpr(48)
LOAD_REGISTERS = gl.constexpr(168)


@gluon.aggregate
class Strided:
    """A (batch, token, head) array in global memory whose entries are rows, or numbers: strides in `unit` elements."""

    pointer: gl.tensor
    batch: gl.tensor
    token: gl.tensor
    head: gl.tensor
    unit: gl.constexpr

    @gluon.jit
    def at(self, b, token, head):
        """Pointers to entries, any shape."""
        to_batch = gl.to_tensor(b).to(gl.int64) * self.batch
        return self.pointer + (to_batch + token.to(gl.int64) * self.token + head.to(gl.int64) * self.head) * self.unit


@gluon.aggregate
class LatentRows:
    """Where this CTA's 64 rows are; row r of a key head is token r // group of query head  head * group + r % group."""

    b: gl.tensor
    first: gl.tensor
    group: gl.tensor
    kv_head: gl.tensor


@gluon.aggregate
class Lengths:
    seq_q: gl.tensor
    seq_k: gl.tensor


@gluon.aggregate
class LatentMemory:
    q: gl.shared_memory_descriptor  # [2, 64, 256]
    q_rope: gl.shared_memory_descriptor  # [64, 64]
    p: gl.shared_memory_descriptor  # [64, BN]
    rope: gl.shared_memory_descriptor  # [stages, 1, BN, 1, 64]
    s: tensor_memory_descriptor  # [64, BN] fp32
    o: tensor_memory_descriptor  # [64, 512] fp32


@gluon.aggregate
class LatentBarriers:
    q: gl.shared_memory_descriptor  # queries are in shared memory: 4 warps
    s: gl.shared_memory_descriptor  # S is complete: commit
    p: gl.shared_memory_descriptor  # P is written, O rescaled, S read: 4 warps
    o: gl.shared_memory_descriptor  # O += P·V is complete: commit


@gluon.aggregate
class LatentContext:
    """What every role can see."""

    q: Strided
    out: Strided  # output, or parts of it in fp32
    lse: Strided
    out_batch: gl.tensor  # of the output: parts are batches of their own
    sinks: gl.tensor
    k: base_value  # rotary parts, see sm100/global_rows.py
    v: base_value  # latents
    keys: KVPipeline  # [2 * stages, 1, BN, 1, 256]
    memory: LatentMemory
    bars: LatentBarriers
    rows: LatentRows
    lengths: Lengths
    run: TileRun
    mods: Modifiers
    scale: gl.tensor
    config: gl.constexpr
    traits: gl.constexpr


@gluon.jit
def latent_kernel(
    q,
    k_desc,
    v_desc,
    out,
    lse,
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
    """Attention of a few query tokens with head dims 576 and 512.

    q, out: (pointer, strides of batch, token, head in units of 8 elements); lse: the same in elements. shape: (seq_q,
    seq_k). places: see `mha_2q.find_sources`. Grid: (row tiles * partitions, key heads, batch).
    """
    partitions: gl.constexpr = config.splitk_partitions
    place = first_grid_index()
    tile = place // partitions
    partition = place - tile * partitions
    b = gl.program_id(2)
    group = gl.to_tensor(traits.group)
    rows = LatentRows(b, tile * config.BM, group, gl.program_id(1))
    k, v, seq_k = key_sources(k_desc, v_desc, shape[1], places, b, config, traits)
    lengths = Lengths(shape[0], seq_k)
    mods = Modifiers(functions[0], functions[1], functions[2], mask_args, score_args)
    run = window(row_span(rows, lengths, mods, config), partition, partitions, seq_k > 0)
    ctx = LatentContext(
        Strided(q[0], q[1], q[2], q[3], 8), Strided(out[0], out[1], out[2], out[3], 8),
        Strided(lse[0], lse[1], lse[2], lse[3], 1), partition * gl.num_programs(2) + b, sinks_ptr, k, v,
        make_ring(config), make_memory(config), make_barriers(), rows, lengths, run, mods, scale, config, traits,
    )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize(
        [(attend_role, (ctx,)), (mma_role, (ctx,)), (load_role, (ctx,))],
        [1, 1],
        [MMA_REGISTERS, LOAD_REGISTERS],
    )


@gluon.jit
def row_span(rows, lengths, mods, config: gl.constexpr):
    """The key tiles that the rows of this CTA may see."""
    offset = lengths.seq_k - lengths.seq_q
    q_lo = rows.first // rows.group + offset
    q_hi = gl.minimum((rows.first + config.BM - 1) // rows.group, lengths.seq_q - 1) + offset
    return tile_span(mods.span(rows.b, 0, q_lo, q_hi, lengths.seq_q, lengths.seq_k, mods.mask_args), config.BN)


@gluon.jit
def key_sources(k, v, seq_k, places, b, config: gl.constexpr, traits: gl.constexpr):
    """(rotary parts, latents, keys) of sequence `b`."""
    if traits.kind == "paged":
        return paged_keys(k, v, places, b, config)
    else:
        return BatchRows(k, b), BatchRows(v, b), seq_k


@gluon.jit
def make_ring(config: gl.constexpr):
    """Slots of two blocks of latents each, with their barriers; the rotary part of a slot is in `LatentMemory.rope`."""
    dtype: gl.constexpr = element_type(config.dtype)
    box: gl.constexpr = [1, config.BN, 1, config.half]
    smem = gl.allocate_shared_memory(dtype, stacked(2 * config.stages, box), box_layout(box, dtype))
    ring = KVPipeline(smem, mbarrier.allocate_mbarrier(batch=2 * config.stages), config.stages, 2, 1)
    ring.init()
    return ring


@gluon.jit
def make_memory(config: gl.constexpr):
    """Shared memory beside the ring, and tensor memory."""
    dtype: gl.constexpr = element_type(config.dtype)
    rope_box: gl.constexpr = [1, config.BN, 1, config.rope]
    wide: gl.constexpr = [config.BM, config.half]
    narrow: gl.constexpr = [config.BM, config.rope]
    p_shape: gl.constexpr = [config.BM, config.BN]
    return LatentMemory(
        gl.allocate_shared_memory(dtype, stacked(2, wide), box_layout(wide, dtype)),
        gl.allocate_shared_memory(dtype, narrow, box_layout(narrow, dtype)),
        gl.allocate_shared_memory(dtype, p_shape, box_layout(p_shape, dtype)),
        gl.allocate_shared_memory(dtype, stacked(config.stages, rope_box), box_layout(rope_box, dtype)),
        allocate_tensor_memory(gl.float32, p_shape, TensorMemoryLayout([config.BM, config.BN], 1)),
        allocate_tensor_memory(gl.float32, [config.BM, config.dim_v], TensorMemoryLayout([config.BM, config.half], 1)),
    )


@gluon.jit
def make_barriers():
    """Every barrier outside the ring, initialised."""
    return LatentBarriers(_barrier(4), _barrier(1), _barrier(4), _barrier(1))


@gluon.jit
def _barrier(count: gl.constexpr):
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=count)
    return bar
