"""Pieces of the CDNA kernels as kernels of their own."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from warpattn.kernels.amd.xcd import tile_of_workgroup


@gluon.jit
def order_kernel(out, total):
    """out[tile] = the workgroup that takes it."""
    tile = tile_of_workgroup(gl.program_id(0), total)
    gl.store(out + tile, gl.program_id(0))
