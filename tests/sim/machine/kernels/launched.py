"""Triton and Gluon kernels as other people write them, launched by `kernel[grid](…)`."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra import libdevice


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n), mask=at < n)


@triton.jit
def colliding_kernel(x, out, BLOCK: tl.constexpr):
    """Every program writes the same elements."""
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + tl.program_id(0) * BLOCK + at))


@triton.jit
def counting_kernel(count):
    tl.atomic_add(count, 1)


@triton.autotune(configs=[triton.Config({"BLOCK": 64}, num_stages=3), triton.Config({"BLOCK": 32})], key=["k_size"])
@triton.jit
def product_kernel(a, b, c, k_size, a_row, b_row, c_row, BLOCK: tl.constexpr):
    """A tile of c = a · b."""
    rows, cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, k_size, 32):
        depth = k + tl.arange(0, 32)
        left = tl.load(a + rows[:, None] * a_row + depth[None, :])
        total = tl.dot(left, tl.load(b + depth[:, None] * b_row + cols[None, :]), total)
    tl.store(c + rows[:, None] * c_row + cols[None, :], total.to(tl.float16))


@triton.jit
def talking_kernel(x, limit):
    tl.device_print("element", tl.load(x + tl.program_id(0)))
    tl.device_assert(tl.load(x + tl.program_id(0)) < limit, "too large")


@triton.jit
def functions_kernel(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at)
    tl.store(out + at, libdevice.asin(value) + libdevice.pow(value, 3.0))
    tl.store(out + BLOCK + at, libdevice.erfinv(value))
    tl.store(out + 2 * BLOCK + at, libdevice.round(value * 10))


@triton.jit
def pairs_kernel(sizes, x, out):
    """`sizes`: a tuple of numbers, of which the second is 1."""
    tl.store(out, tl.load(x) * sizes[0] + sizes[1])


@triton.jit
def grouped_kernel(table, out, BLOCK: tl.constexpr):
    """A row of each tensor whose address is in `table`."""
    at = tl.arange(0, BLOCK)
    source = tl.load(table + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    tl.store(out + tl.program_id(0) * BLOCK + at, tl.load(source + at))


@gluon.jit
def tma_copy_kernel(source, target, waits: gl.constexpr):
    """A tile by TMA; without its wait a race."""
    smem = gl.allocate_shared_memory(source.dtype, source.block_type.shape, source.layout)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, source.block_type.nbytes)
    tma.async_load(source, [0, 0], bar, smem)
    if waits:
        mbarrier.wait(bar, 0)
    tma.async_store(target, [0, 0], smem)
    tma.store_wait(0)


@triton.jit
def ticket_kernel(count, out):
    """Right only where the programs take their tickets in order; with one ticket too many, it writes outside."""
    program = tl.program_id(0)
    ticket = tl.atomic_add(count, 1, sem="relaxed")
    tl.store(out + program + (ticket - program) * 4096, ticket)


@triton.jit
def double_kernel(x, out):
    """Tiles by descriptors that the host has made."""
    row = tl.program_id(0) * 32
    out.store([row, 0], x.load([row, 0]) * 2)


@triton.jit
def last_sums_kernel(parts, done, out, n, ORDER: tl.constexpr, BLOCK: tl.constexpr):
    """Each program writes its part; the last to have done so sums all of them up."""
    tl.store(parts + tl.program_id(0), 1.0)
    if tl.atomic_add(done, 1, sem=ORDER) == n - 1:
        at = tl.arange(0, BLOCK)
        tl.store(out, tl.sum(tl.load(parts + at, at < n, 0.0)))


@triton.jit
def flag_kernel(data, flag, out, STORE: tl.constexpr, LOAD: tl.constexpr):
    """Program 0 writes data and raises a flag; program 1 reads the data after it has seen that."""
    if tl.program_id(0) == 0:
        tl.store(data, 7.0)
        tl.atomic_store(flag, 1, sem=STORE)
    else:
        seen = tl.atomic_load(flag, sem=LOAD)
        while seen == 0:
            seen = tl.atomic_load(flag, sem=LOAD)
        tl.store(out, tl.load(data))
