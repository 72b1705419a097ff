"""Third rung: a warp that only loads, and two warpgroups that keep a product queued behind the one at hand.

      producer warp     K(0) K(1) V(0) K(2) V(1) ...          rings of two tiles for K and for V
      tensor core       QK(0)        QK(1) PV(0)        QK(2) PV(1)   ...
      softmax                 p(0)              p(1)                       of each warpgroup

What the shipped kernel has beyond this: a persistent grid with a scheduler, a lazy maximum, sums per lane, rounding in
pairs, and full tiles that are not compared with the diagonal.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from warpattn.kernels.nvidia.pipelines import consumer_state, make_pipeline, producer_state

from .naive import DIM, KEYS, SCORES, hide, key_tiles, softmax_step, start, store

ROWS = 128  # queries of a program, half of them for each warpgroup
STAGES = gl.constexpr(2)


@gluon.jit
def attention_kernel(q, k, v, out, scale, seq, heads: gl.constexpr, causal: gl.constexpr):
    """As the second rung's, with the same arguments, for 128 queries. Grid: (seq / 128, batch * heads)."""
    q_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, 1, 64, 1, DIM], q.layout)
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, KEYS, 1, DIM], k.layout)
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, KEYS, 1, DIM], v.layout)
    rings = (make_pipeline(q_tiles, 8, 1, 2), make_pipeline(k_tiles, 8, STAGES), make_pipeline(v_tiles, 8, STAGES))
    fence_async_shared()
    row = gl.program_id(0) * 128
    tiles = key_tiles(row + 128, seq, causal)
    place = (gl.program_id(1) // heads, row, gl.program_id(1) % heads, tiles)
    gl.warp_specialize(
        [
            (attend, (rings, out, place, scale, (seq, heads), causal, 0)),
            (attend, (rings, out, place, scale, (seq, heads), causal, 1)),
            (load, (rings, (q, k, v), place)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def load(rings, descs, place):
    """The producer: Q once, K one tile ahead of V."""
    b, row, h, tiles = place
    full = rings[0].producer_acquire(producer_state(1))
    mbarrier.expect(full, 2 * descs[0].block_type.nbytes)
    for half in gl.static_range(2):
        tma.async_load(descs[0], [b, row + 64 * half, h, 0], full, rings[0].tile(producer_state(1), half))
    k_state = load_tile(rings[1], descs[1], producer_state(STAGES), [b, 0, h, 0])
    v_state = producer_state(STAGES)
    for i in range(1, tiles):
        k_state = load_tile(rings[1], descs[1], k_state, [b, i * KEYS, h, 0])
        v_state = load_tile(rings[2], descs[2], v_state, [b, (i - 1) * KEYS, h, 0])
    load_tile(rings[2], descs[2], v_state, [b, (tiles - 1) * KEYS, h, 0])


@gluon.jit
def load_tile(ring, desc, state, coord):
    """One tile into the next slot of a ring."""
    full = ring.producer_acquire(state)
    mbarrier.expect(full, desc.block_type.nbytes)
    tma.async_load(desc, coord, full, ring.tile(state))
    return state.step()


@gluon.jit
def attend(rings, out, place, scale, sizes, causal: gl.constexpr, half: gl.constexpr):
    """A consumer: Q·K of tile i is queued before P·V of tile i - 1, which runs beside the softmax of tile i."""
    b, row, h, tiles = place
    row = row + 64 * half
    q_ring, k_ring, v_ring = rings
    q_ring.consumer_wait(consumer_state(1))
    q_tile = q_ring.tile(consumer_state(1), half).reshape([64, DIM])
    k_state = consumer_state(STAGES)
    v_state = consumer_state(STAGES)
    top, total, o = start()
    k_ring.consumer_wait(k_state)
    s = warpgroup_mma_wait(0, deps=(scores(q_tile, k_ring, k_state),))
    k_ring.consumer_release(k_state)
    k_state = k_state.step()
    top, total, alpha, p = softmax_step(top, total, hide(s, row, 0, causal), scale)
    for i in range(1, tiles):
        k_ring.consumer_wait(k_state)
        s = scores(q_tile, k_ring, k_state)
        v_ring.consumer_wait(v_state)
        o = warpgroup_mma(p, v_ring.tile(v_state).reshape([KEYS, DIM]), o, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))
        k_ring.consumer_release(k_state)
        k_state = k_state.step()
        top, total, alpha, following = softmax_step(top, total, hide(s, row, i, causal), scale)
        o = warpgroup_mma_wait(0, deps=(o, p))[0] * alpha[:, None]
        v_ring.consumer_release(v_state)
        v_state = v_state.step()
        p = following
    v_ring.consumer_wait(v_state)
    o = warpgroup_mma(p, v_ring.tile(v_state).reshape([KEYS, DIM]), o, is_async=True)
    o = warpgroup_mma_wait(0, deps=(o, p))[0]
    store(out, o, total, b, row, h, sizes)


@gluon.jit
def scores(q_tile, ring, state):
    """Start S = Q·Kᵀ with the tile of a slot."""
    zero = gl.zeros([64, KEYS], gl.float32, SCORES)
    keys = ring.tile(state).reshape([KEYS, DIM]).permute((1, 0))
    return warpgroup_mma(q_tile, keys, zero, use_acc=False, is_async=True)
