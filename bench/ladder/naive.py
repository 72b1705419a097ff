"""First rung: everything in turn. One warpgroup, 64 queries, and for every tile of 128 keys

      load K ──▶ shared memory ──▶ S = Q·Kᵀ ──▶ softmax ──▶ load V ──▶ shared memory ──▶ O += P·V

Nothing overlaps inside a program; what overlaps are the programs that fit on an SM beside each other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

ROWS = 64  # queries of a program
KEYS = gl.constexpr(128)  # of a tile
DIM = gl.constexpr(128)
LOG2_E = 1.4426950408889634
SCORES = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))
OPERAND = gl.constexpr(gl.DotOperandLayout(0, SCORES, 2))
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
TILE = gl.constexpr(gl.NVMMASharedLayout.get_default_for([128, 128], gl.bfloat16))


@gluon.jit
def attention_kernel(q, k, v, out, scale, seq, heads: gl.constexpr, causal: gl.constexpr):
    """O of 64 queries of a head; tensors are contiguous (batch, seq, heads, 128). Grid: (seq / 64, batch * heads)."""
    row = gl.program_id(0) * 64
    b = gl.program_id(1) // heads
    h = gl.program_id(1) % heads
    q_tile = gl.allocate_shared_memory(gl.bfloat16, [64, DIM], TILE)
    k_tile = gl.allocate_shared_memory(gl.bfloat16, [KEYS, DIM], TILE)
    v_tile = gl.allocate_shared_memory(gl.bfloat16, [KEYS, DIM], TILE)
    copy(places(q, b, row, h, seq, heads, 64, COPY), q_tile)

    top, total, o = start()
    for i in range(key_tiles(row + 64, seq, causal)):
        copy(places(k, b, i * KEYS, h, seq, heads, KEYS, COPY), k_tile)
        zero = gl.zeros([64, KEYS], gl.float32, SCORES)
        s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        s = hide(s, row, i, causal)
        top, total, alpha, p = softmax_step(top, total, s, scale)
        copy(places(v, b, i * KEYS, h, seq, heads, KEYS, COPY), v_tile)
        o = warpgroup_mma(p, v_tile, o * alpha[:, None], is_async=True)
        o = warpgroup_mma_wait(0, deps=(o, p))[0]
    store(out, o, total, b, row, h, (seq, heads))


@gluon.jit
def copy(source, tile):
    """Rows through registers into shared memory, for the tensor core to read; their last reader is done by then."""
    gl.barrier()
    tile.store(gl.load(source))
    fence_async_shared()
    gl.barrier()


@gluon.jit
def start():
    """Maximum and sum of 64 rows that have seen no key, and their output."""
    top = gl.full([64], -float("inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
    return top, total, gl.zeros([64, DIM], gl.float32, SCORES)


@gluon.jit
def key_tiles(end, seq, causal: gl.constexpr):
    """Key tiles that queries before `end` see."""
    tiles = seq // KEYS
    if causal:
        tiles = (end + KEYS - 1) // KEYS
    return tiles


@gluon.jit
def hide(s, row, i, causal: gl.constexpr):
    """Scores [64, 128] of key tile `i`, without the keys behind their query."""
    if causal:
        queries = row - i * KEYS + gl.arange(0, 64, gl.SliceLayout(1, SCORES))
        keys = gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
        s = gl.where(queries[:, None] >= keys[None, :], s, -float("inf"))
    return s


@gluon.jit
def softmax_step(top, total, s, scale):
    """(maximum, sum, factor of what was accumulated, P as an operand) with scores `s`; `scale` has log2(e) in it."""
    higher = gl.maximum(top, gl.max(s, 1))
    alpha = gl.exp2((top - higher) * scale)
    p = gl.exp2(s * scale - (higher * scale)[:, None])
    operand = gl.convert_layout(p.to(gl.bfloat16), OPERAND)
    return higher, total * alpha + gl.sum(p, 1), alpha, operand


@gluon.jit
def places(x, b, row, h, seq, heads: gl.constexpr, rows: gl.constexpr, layout: gl.constexpr):
    """Addresses of rows of one head."""
    first = x + ((b * seq + row).to(gl.int64) * heads + h) * DIM
    offsets = gl.arange(0, rows, gl.SliceLayout(1, layout)) * (heads * DIM)
    return first + offsets[:, None] + gl.arange(0, DIM, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def store(out, o, total, b, row, h, sizes):
    """Normalise and write 64 rows; `sizes`: (seq, heads)."""
    o = (o / total[:, None]).to(gl.bfloat16)
    gl.store(places(out, b, row, h, sizes[0], sizes[1], 64, SCORES), o)


def arguments(q, k, v, out):
    """What a launch passes, but for `causal`."""
    _, seq, heads, dim = q.shape
    return {"q": q, "k": k, "v": v, "out": out, "scale": dim**-0.5 * LOG2_E, "seq": seq, "heads": heads}
