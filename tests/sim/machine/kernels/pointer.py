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
