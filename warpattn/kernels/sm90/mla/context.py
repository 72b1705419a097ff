"""Shared memory of the Hopper kernel for latent attention. Its roles get a `DecodeContext`, in which `keys.k` is for
the rotary parts and `keys.v` for the latents."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...nvidia.pipelines import StagedPipeline, empty_arrivals, make_pipeline
from ..layouts import element_type, tile_layout


@gluon.aggregate
class MlaRings:
    """Shared memory. A slot of the ring is a key tile: two blocks of latents, and the rotary part in `rope`, which the
    tile's probabilities replace later. One more barrier follows the ring's: for a tile that the producer clears before
    the warpgroups read it."""

    keys: StagedPipeline  # [2 * stages, 1, N, 1, 256]
    rope: gl.shared_memory_descriptor  # [stages, 1, N, 1, 64]
    q: gl.shared_memory_descriptor  # [2, 64, 256], of both warpgroups
    q_rope: gl.shared_memory_descriptor  # [1, 64, 64]
    ready: gl.shared_memory_descriptor  # [2, 1] barriers: of each warpgroup, its probabilities of a tile are written
    marks: (
        gl.shared_memory_descriptor
    )  # [4, 64, 4] fp32: of each warpgroup, reference maxima and the factors that rescale to them
    sums: gl.shared_memory_descriptor  # [2, 64, 4] fp32, of each warpgroup


@gluon.jit
def make_mla_rings(config: gl.constexpr):
    """Allocate shared memory and initialise every barrier."""
    dtype: gl.constexpr = element_type(config.element)
    wide: gl.constexpr = tile_layout(config.block_n, config.half, dtype)
    narrow: gl.constexpr = tile_layout(config.block_n, config.rope, dtype)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([config.rows, config.half], dtype)
    q_narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([config.rows, config.rope], dtype)
    keys = gl.allocate_shared_memory(dtype, [2 * config.stages, 1, config.block_n, 1, config.half], wide)
    rope = gl.allocate_shared_memory(dtype, [config.stages, 1, config.block_n, 1, config.rope], narrow)
    q = gl.allocate_shared_memory(dtype, [2, config.rows, config.half], q_layout)
    q_rope = gl.allocate_shared_memory(dtype, [1, config.rows, config.rope], q_narrow)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    marks = gl.allocate_shared_memory(gl.float32, [4, config.rows, 4], plain)
    sums = gl.allocate_shared_memory(gl.float32, [2, config.rows, 4], plain)
    ready = mbarrier.allocate_mbarrier(batch=2)
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=1)
    ring = make_pipeline(keys, empty_arrivals(config.topology, "K and V"), config.stages, 2, more=1)
    return MlaRings(ring, rope, q, q_rope, ready, marks, sums)
