"""Values that are not finite in a tile of shared memory: whether there are any, and what takes them out.

Whether there are any is asked of 32 bits at once: all bits of an exponent and one more of its lowest give a sign bit.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared


@gluon.constexpr_function
def run_layout(columns, run):
    """Registers of rows of a tile in a warpgroup, runs of 16 bytes."""
    lanes = min(columns // run, 32)
    return gl.BlockedLayout([1, run], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.constexpr_function
def exponents(dtype):
    """(bits of the exponents, their lowest ones, the signs) of the numbers in 32 bits."""
    highest, lowest = {
        "fp32": (0x7F800000, 0x800000), "bf16": (0x7F80, 0x80), "fp16": (0x7C00, 0x400), "fp8e4nv": (0x7F, 1),
        "fp8e5": (0x7C, 4),
    }[str(dtype)]  # fmt: skip
    bits = dtype.primitive_bitwidth
    each = sum(1 << at for at in range(0, 32, bits))
    sign = (1 << (bits - 1)) * each
    return highest * each, lowest * each, sign - (1 << 32)


@gluon.jit
def any_nonfinite(tile):
    """Whether a value of a tile [N, columns] is NaN or infinite."""
    dtype: gl.constexpr = tile.dtype
    rows: gl.constexpr = tile.shape[0]
    columns: gl.constexpr = tile.shape[1] * dtype.primitive_bitwidth // 32
    words = tile.reinterpret(gl.int32, [rows, columns], gl.NVMMASharedLayout.get_default_for([rows, columns], gl.int32))
    layout: gl.constexpr = run_layout(columns, 4)
    bits: gl.constexpr = exponents(dtype)
    found = gl.zeros([16, columns], gl.int32, layout)
    for first in gl.static_range(0, rows, 16):
        found |= (words.slice(first, 16, 0).load(layout) & bits[0]) + bits[1]
    return gl.max(gl.max(((found & bits[2]) != 0).to(gl.int32), 1), 0) != 0


@gluon.jit
def clear_nonfinite(tile):
    """0 for what is NaN or infinite in a tile [N, columns]."""
    if any_nonfinite(tile):
        layout: gl.constexpr = run_layout(tile.shape[1], 8)
        rows: gl.constexpr = tile.shape[0]
        for first in gl.static_range(0, rows, 16):
            part = tile.slice(first, 16, 0)
            values = part.load(layout)
            part.store(gl.where(values.to(gl.float32) - values.to(gl.float32) == 0, values, gl.zeros_like(values)))
        fence_async_shared()
        gl.barrier()
