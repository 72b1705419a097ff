"""Second rung: TMA brings the tiles, and the next copy runs beside the arithmetic of this tile.

      slot 0     K(0)         K(1) ..........  K(2)             a copy starts as soon as the product
      slot 1     V(0)              V(1) .......                 that read the slot is done
      products      QK(0)       PV(0)   QK(1)
      softmax            p(0)                p(1)

Two slots take as much shared memory as the tiles of the first rung, so as many programs fit on an SM.
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import naive
from .naive import DIM, KEYS, SCORES, hide, key_tiles, softmax_step, start, store

ROWS = 64  # queries of a program


@gluon.jit
def attention_kernel(q, k, v, out, scale, seq, heads: gl.constexpr, causal: gl.constexpr):
    """As the first rung's, with descriptors of boxes (1, 64 or 128, 1, 128) in place of the pointers q, k and v."""
    row = gl.program_id(0) * 64
    b = gl.program_id(1) // heads
    h = gl.program_id(1) % heads
    q_slot = gl.allocate_shared_memory(gl.bfloat16, q.block_type.shape, q.layout)
    k_slot = gl.allocate_shared_memory(gl.bfloat16, k.block_type.shape, k.layout)
    v_slot = gl.allocate_shared_memory(gl.bfloat16, v.block_type.shape, v.layout)
    k_full = mbarrier.allocate_mbarrier()
    v_full = mbarrier.allocate_mbarrier()
    mbarrier.init(k_full, count=1)
    mbarrier.init(v_full, count=1)
    fence_async_shared()
    gl.barrier()
    mbarrier.expect(k_full, q.block_type.nbytes + k.block_type.nbytes)
    tma.async_load(q, [b, row, h, 0], k_full, q_slot)
    tma.async_load(k, [b, 0, h, 0], k_full, k_slot)
    mbarrier.expect(v_full, v.block_type.nbytes)
    tma.async_load(v, [b, 0, h, 0], v_full, v_slot)

    top, total, o = start()
    tiles = key_tiles(row + 64, seq, causal)
    for i in range(tiles):
        mbarrier.wait(k_full, i & 1)
        zero = gl.zeros([64, KEYS], gl.float32, SCORES)
        keys = k_slot.reshape([KEYS, DIM]).permute((1, 0))
        s = warpgroup_mma(q_slot.reshape([64, DIM]), keys, zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        load_next(k, k_slot, k_full, [b, (i + 1) * KEYS, h, 0], i + 1 < tiles)
        s = hide(s, row, i, causal)
        top, total, alpha, p = softmax_step(top, total, s, scale)
        mbarrier.wait(v_full, i & 1)
        o = warpgroup_mma(p, v_slot.reshape([KEYS, DIM]), o * alpha[:, None], is_async=True)
        o = warpgroup_mma_wait(0, deps=(o, p))[0]
        load_next(v, v_slot, v_full, [b, (i + 1) * KEYS, h, 0], i + 1 < tiles)
    store(out, o, total, b, row, h, (seq, heads))


@gluon.jit
def load_next(desc, slot, full, place, some):
    """Start the copy of the next tile into a slot, if there is one, when every warp has finished reading the slot."""
    gl.barrier()
    mbarrier.expect(full, desc.block_type.nbytes, pred=some)
    tma.async_load(desc, place, full, slot, pred=some)


def arguments(q, k, v, out):
    """What a launch passes, but for `causal`."""
    boxes = {"q": descriptor(q, ROWS), "k": descriptor(k, 128), "v": descriptor(v, 128)}
    return naive.arguments(q, k, v, out) | boxes


def descriptor(x, rows):
    """Rows of one head of x (batch, seq, heads, dim) as TMA copies them."""
    box = [1, rows, 1, x.shape[3]]
    return TensorDescriptor.from_tensor(x, box, gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16))
