"""Pieces of the CDNA kernels as kernels of their own."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from warpattn.kernels.amd.xcd import tile_of_workgroup


@gluon.jit
def order_kernel(out, total):
    """out[tile] = the workgroup that takes it."""
    tile = tile_of_workgroup(gl.program_id(0), total)
    gl.store(out + tile, gl.program_id(0))


@gluon.jit
def division_kernel(a, b, quotients, remainders, divide: gl.constexpr, modulo: gl.constexpr, lanes: gl.constexpr):
    """Quotients and remainders of 64 numbers, rounded down, by a warp."""
    i = gl.arange(0, 64, gl.BlockedLayout([64 // lanes], [lanes], [1], [0]))
    x, y = gl.load(a + i), gl.load(b + i)
    gl.store(quotients + i, divide(x, y))
    gl.store(remainders + i, modulo(x, y))
