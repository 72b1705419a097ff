"""Kernels whose pointers lead into several tensors: chosen by a mask, loaded from a table, made of integers."""

import triton
import triton.language as tl


@triton.jit
def choose_kernel(x, y, out_x, out_y, n, OP: tl.constexpr):
    """Reads x or y, writes out_x or out_y, by a condition for each lane."""
    at = tl.arange(0, 64)
    odd = at % 2 == 1
    source = tl.where(odd, x + at, y + at)
    target = tl.where(odd, out_x + at, out_y + at)
    if OP == "store":
        tl.store(target, tl.load(source))
    elif OP == "masked":
        tl.store(target, tl.load(source, mask=at < n, other=7.0), mask=at >= 3)
    elif OP == "add":
        tl.atomic_add(target, tl.load(source))
    elif OP == "outside":
        tl.store(target, tl.load(tl.where(odd, source + n, source)))


@triton.jit
def grouped_kernel(tables, sizes, out):
    """out[g] = the sum of the tensor whose address is tables[g], by a program for each."""
    group = tl.program_id(0)
    start = tl.load(tables + group).to(tl.pointer_type(tl.float32))
    at = tl.arange(0, 128)
    tl.store(out + group, tl.sum(tl.load(start + at, mask=at < tl.load(sizes + group), other=0.0)))


@triton.jit
def integer_kernel(x, out):
    """out = x by way of an integer: the pointer rounded down to 64 bytes, and the address itself in `out`."""
    at = tl.arange(0, 64)
    address = x.to(tl.int64, bitcast=True)
    aligned = (address & ~63).to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(out + at, tl.load(aligned + at))


@triton.jit
def address_kernel(x, out):
    tl.store(out, x.to(tl.int64, bitcast=True))


@triton.jit
def between_warps_kernel(x, out, N: tl.constexpr, MODE: tl.constexpr):
    """One program moves numbers through global memory: `x` to `out`, or `x` in place."""
    i = tl.arange(0, N)
    if MODE == "flip":
        tl.store(x + i, tl.load(x + N - 1 - i, mask=i > 9), mask=i > 9)
    elif MODE == "flip, barrier":
        a = tl.load(x + N - 1 - i)
        tl.debug_barrier()
        tl.store(x + i, a)
    elif MODE == "rounds":
        for _ in range(3):
            a = tl.load(x + i)
            tl.debug_barrier()
            tl.store(x + (i ^ N // 2), a)
    elif MODE == "in place":
        for _ in range(3):
            tl.store(x + i, tl.load(x + i) + 1)
    elif MODE == "few in place":  # several warps load each, one stores it
        tl.store(x + tl.arange(0, 16), tl.load(x + tl.arange(0, 16)) + 1)
    elif MODE == "one":
        tl.store(x + i, tl.load(x + i) + 1)
        tl.store(out, tl.load(x + N - 1))
    elif MODE == "sum":  # its own barriers order the stores before it, too
        a = tl.load(x + i)
        tl.store(x + i, a + 1)
        total = tl.sum(a)
        tl.store(out + i, tl.load(x + (i ^ N // 2)) + total)
