"""Takes NaN and infinite values out of a V tile in shared memory; nvidia/finite.py detects them.

A hidden key's weight is 0, but 0 times NaN or infinity is NaN. So rows of V that no query sees are cleared before the
product; where some rows see a value and others do not, it is added to those that do and cleared, too.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ..nvidia.finite import run_layout


@gluon.jit
def clear_outside(tile, begin, end):
    """Zeroes the rows of a tile [N, columns] before `begin` and from `end` on, 16 at a time."""
    layout: gl.constexpr = run_layout(tile.shape[1], 8)
    row = gl.arange(0, 16, gl.SliceLayout(1, layout))[:, None]
    rows: gl.constexpr = tile.shape[0]
    for first in gl.static_range(0, rows, 16):
        if (first < begin) | (first + 16 > end):
            part = tile.slice(first, 16, 0)
            values = part.load(layout)
            part.store(gl.where((first + row >= begin) & (first + row < end), values, gl.zeros_like(values)))
    fence_async_shared()
    gl.barrier()


@gluon.jit
def take_nonfinite(tile, number, columns):
    """Zeroes what is not finite in row `number` of a tile [N, columns], at `columns` [M], and returns its kinds, int8
    [M]: 1 and -1 for infinities, 2 for NaN, 0 for finite values."""
    flat = tile.reshape([tile.shape[0] * tile.shape[1]])
    at = number * tile.shape[1] + columns
    found = flat.gather(at, 0)
    value = found.to(gl.float32)
    finite = value - value == 0
    gl.barrier()  # every thread has read the row
    flat.scatter(gl.where(finite, found, gl.zeros_like(found)), at, 0)
    kind = gl.where(value != value, 2, gl.where(value > 0, 1, -1))
    return gl.where(finite, 0, kind).to(gl.int8)


@gluon.jit
def nonfinite_value(kind):
    """The fp32 values of kinds that `take_nonfinite` returned."""
    infinite = kind.to(gl.float32) * float("inf")
    return gl.where(kind == 0, 0.0, gl.where(kind == 2, float("nan"), infinite))
