"""Kernels that return early, in themselves and in functions, and other people's odd operations."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@triton.jit
def chosen(x, way):
    """-x, x, x + 1, or 2 x of what is large."""
    if way == 0:
        return x
    if way == 1:
        return x + 1
    if x > 5.0:
        return x * 2
    return -x


@triton.jit(noinline=True)
def outlined(x, way):
    if way == 2:
        return x * 3.0
    return x + way


@triton.jit
def returning_kernel(x, out, programs):
    program = tl.program_id(0)
    if program >= programs:
        return
    value = tl.load(x + program)
    for way in range(3):
        value = chosen(value, way + program)
    tl.store(out + program, outlined(value, program))


@triton.jit
def _either(x, i):
    if x > 0:
        if i > 9:
            return x, i
        return x * 2, i
    return -x, i + 1


@triton.jit
def mapping_kernel(x, out, N: tl.constexpr):
    """A function with returns of its own for each element."""
    i = tl.arange(0, N)
    value, number = tl.map_elementwise(_either, tl.load(x + i), i)
    tl.store(out + i, value + number)


@triton.jit
def rounding_kernel(x, cut, wide, high, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(cut + i, tl.load(x + i).to(cut.dtype.element_ty, fp_downcast_rounding="rtz"))
    value = tl.load(wide + i).to(tl.uint64)
    tl.store(high + i, tl.umulhi(value, value + 12345).to(tl.int64))


@triton.jit
def waiting_kernel(out):
    """Waits for some time to pass, then names its multiprocessor."""
    began = tl.extra.cuda.globaltimer()
    while tl.extra.cuda.globaltimer() < began + 10:
        pass
    tl.store(out + tl.program_id(0), tl.extra.cuda.smid())


@gluon.jit
def _raise(bar, out, wanted):
    if wanted == 0:
        return
    mbarrier.arrive(bar, count=1)


@gluon.jit
def _wait(bar, out, wanted):
    mbarrier.wait(bar, 0)
    gl.store(out, 1)


@gluon.jit
def role_kernel(out, wanted):
    """A role that may return before it arrives."""
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    gl.warp_specialize([(_wait, (bar, out, wanted)), (_raise, (bar, out, wanted))], [4], [24])
    mbarrier.invalidate(bar)


@triton.jit
def scaled_kernel(a, b, a_scale, b_scale, out, M: tl.constexpr, K: tl.constexpr):
    """A product of fp8 with one scale for 32 elements of K."""
    m, k, block = tl.arange(0, M), tl.arange(0, K), tl.arange(0, K // 32)
    x, y = tl.load(a + m[:, None] * K + k[None, :]), tl.load(b + k[:, None] * M + m[None, :])
    at = m[:, None] * (K // 32) + block[None, :]
    product = tl.dot_scaled(x, tl.load(a_scale + at), "e4m3", y, tl.load(b_scale + at), "e4m3")
    tl.store(out + m[:, None] * M + m[None, :], product)


@triton.jit
def sum_kernel(out, x, N: tl.constexpr):
    tl.atomic_add(out + tl.arange(0, N), tl.load(x + tl.arange(0, N)), sem="relaxed")


ROWS: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0]))
TURNED: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [1, 4], [1, 0]))
VOTE: gl.constexpr = gl.constexpr(
    "{ .reg .pred a, b; setp.gtu.f32 a, $1, $2; vote.sync.any.pred b, a, 0xffffffff; selp.b32 $0, 1, 0, b; }"
)


@gluon.jit
def voting_kernel(x, out, N: gl.constexpr, KIND: gl.constexpr):
    """Doubles rows of x [128, N] in warps with a sum above 4, and does something else there."""
    at = gl.arange(0, 128, gl.SliceLayout(1, ROWS))[:, None] * N + gl.arange(0, N, gl.SliceLayout(0, ROWS))[None, :]
    tile = gl.load(x + at)
    total = gl.sum(tile, 1)
    moved = gl.inline_asm(VOTE, "=r,f,f", [total, gl.full_like(total, 4.0)], gl.int32) != 0
    for _ in range(1):
        if KIND == "loop":
            moved = moved | (gl.program_id(0) > 9)
    if moved:
        tile = tile * 2.0
        if KIND == "columns":
            tile += gl.max(tile, 1)[:, None]
        elif KIND == "rows":
            tile += gl.max(tile, 0)[None, :]
        elif KIND == "barrier" or KIND == "loop":
            gl.barrier()
        elif KIND == "layout":
            tile = gl.convert_layout(gl.convert_layout(tile, TURNED) + 1.0, ROWS)
        elif KIND == "inside" and gl.program_id(0) > 9:
            gl.barrier()
    if KIND == "outside":
        gl.barrier()
    gl.store(out + at, tile)
