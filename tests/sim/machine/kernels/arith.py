"""Kernels that divide by zero, and stores whose lanes collide."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from warpattn.kernels.sm90.decode.prefetch import BOXES, prefetch


@triton.jit
def divide_kernel(x, y, out, n, OP: tl.constexpr, BLOCK: tl.constexpr):
    """x / y where the mask is on; the lanes beyond n divide by what they loaded there, which is 0."""
    at = tl.arange(0, BLOCK)
    a, b = tl.load(x + at), tl.load(y + at, mask=at < n, other=0)
    if OP == "quotient":
        result = a // b
    elif OP == "rest":
        result = a % b
    elif OP == "chosen":
        result = tl.where(b == 0, -1, a // b)
    else:
        result = tl.where(at < n, a // b, 0) + tl.sum(a // tl.where(at < n, b, 1), 0)
    tl.store(out + at, result, mask=at < n)


@triton.jit
def loop_kernel(out, n, step):
    """As many turns as `step` goes into n."""
    total = 0
    for i in range(n // step):
        total += i
    tl.store(out, total)


@triton.jit
def while_kernel(out, n, step):
    """The same, with a condition that is computed anew before every turn."""
    total, i = 0, 0
    while i < n // step:
        total += i
        i += 1
    tl.store(out, total)


@triton.jit
def collide_kernel(x, out, width, BLOCK: tl.constexpr):
    """Lane i writes x[i] to out[i % width]."""
    at = tl.arange(0, BLOCK)
    tl.store(out + at % width, tl.load(x + at))


@gluon.jit
def prefetch_kernel(x_desc, divisor, n, IN: gl.constexpr):
    """The first n threads prefetch a box each; a quotient is which, or whether, or where other threads do not look."""
    thread = gl.arange(0, 128, BOXES)
    quotient = thread // divisor
    wanted, row = (thread < n).to(gl.int32), thread
    if IN == "coordinate":
        row = quotient
    elif IN == "wanted":
        wanted = quotient
    else:
        row = gl.where(thread < n, thread, quotient)
    prefetch(x_desc, (0 * row, row, 0 * row, 0 * row), wanted)
