"""TMA descriptors: a tensor in global memory seen through a box.

Reading takes the part of the box that lies inside the tensor and fills the rest with zeros or NaN; writing drops what
lies outside. Strides are in elements, the last one is 1.

Addresses wrap around at 2**64 bytes, as they do on the card, so the extents may promise more memory than there is:

    extents (.., 2**30 rows), strides (2**34 - row, row, .., row) + coordinates (2**30, start + n, .., 2**30 - n + i)

reach row start + i, and rows from n on lie outside. Such a descriptor is bounded by what a box really touches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ..errors import SimulationError
from ..ir.formats import encode, memory_dtype
from ..ir.valuetypes import Type
from .findings import Finding
from .global_memory import GlobalBuffer, GlobalMemory, Toucher
from .shared import MemDesc

_ADDRESSES = 1 << 64
_ALIGNMENT = 16  # bytes: of the first element, and of strides


class PixelBox(NamedTuple):
    """The pixels of a tensor [batch, …, channels] that a copy in im2col mode visits: in each spatial dimension from
    `lower` to its size - 1 + `upper`, with a step in each dimension of the tensor."""

    lower: tuple[int, ...]
    upper: tuple[int, ...]
    steps: tuple[int, ...]


@dataclass(frozen=True)
class TensorDescriptor:
    """A descriptor argument: a tensor, and optionally the shape of its box.

    shape and strides (in elements) replace the tensor's own, for views that no tensor can have. copied: the
    box of a copy that has fewer rows than a tile and fills, or stores, its first rows. padding: the value read outside
    of the tensor, "zero" or "nan". tf32: whether fp32 is rounded to tf32. pixels: for im2col mode.
    """

    tensor: Any
    box: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None
    copied: tuple[int, ...] | None = None
    padding: str = "zero"
    tf32: bool = False
    pixels: PixelBox | None = None


class Descriptor:
    """A descriptor inside a run."""

    def __init__(
        self,
        buffer: GlobalBuffer,
        offset: int,
        shape: Sequence[int],
        strides: Sequence[int],
        kind: Type,
        nan: bool = False,
    ) -> None:
        self.buffer, self.kind = buffer, kind
        self.tf32, self.pixels = False, cast("PixelBox | None", None)
        self.outside = self.outside_of(nan)
        self.shape = tuple(int(n) for n in shape)
        self.box: tuple[int, ...] = kind.shape or ()
        size = kind.itemsize
        whole = buffer.nbytes // size * size
        self.elements = buffer.bytes[:whole].view(memory_dtype(kind.elem))
        self.offset = offset  # bytes
        self.strides = tuple(int(s) for s in strides)
        self.ratio = size // buffer.granule

    def rows_of(self, view: MemDesc) -> MemDesc:
        """Return the part of a tile that a copy of the descriptor's box fills or stores: its first rows."""
        if self.box == self.kind.shape:
            return view
        rows, columns = prod(self.box[:-1]), self.box[-1]

        def first(array: np.ndarray) -> np.ndarray:
            part: np.ndarray = array.reshape(len(array), -1, columns)[:, :rows]
            return part.reshape(len(array), *self.box)

        return view.derived(("first rows", self.box), first)

    def outside_of(self, nan: bool) -> Any:
        """Return the bits that are read outside of the tensor."""
        return encode(np.array(np.nan), self.kind.elem)[()] if nan else 0

    def _inside(
        self, coordinates: Sequence[int], box_shape: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[slice, ...]] | None:
        """Intersect tensor and box: first coordinates, sizes, and slices of the box; None if they do not meet."""
        first, sizes, box = [], [], []
        for start, n, extent in zip(coordinates, box_shape, self.shape, strict=False):
            low, high = max(0, int(start)), min(int(start) + n, extent)
            if low >= high:
                return None
            first.append(low)
            sizes.append(high - low)
            box.append(slice(low - int(start), high - int(start)))
        return tuple(first), tuple(sizes), tuple(box)

    def _at(self, first: Sequence[int], sizes: Sequence[int], who: Toucher, verb: str) -> tuple[int, str]:
        """Return the number of the buffer's element at a coordinate, and an error if the part leaves the buffer."""
        size = self.kind.itemsize
        moved = sum(i * s for i, s in zip(first, self.strides, strict=False)) * size
        start = (self.offset + moved + _ADDRESSES // 2) % _ADDRESSES - _ADDRESSES // 2
        last = start + (1 + sum((n - 1) * s for n, s in zip(sizes, self.strides, strict=False))) * size
        if start >= 0 and last <= self.buffer.nbytes:
            return start // size, ""
        return 0, f"{who.place} {verb} bytes {start}..{last} of {self.buffer.name}, which has {self.buffer.nbytes}"

    def _part(self, sizes: tuple[int, ...], at: int) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
        """Return the elements of a part, and a function for its shadow."""
        size = self.kind.itemsize
        elements = as_strided(self.elements[at:], sizes, [s * size for s in self.strides])

        def shadow(array: np.ndarray) -> np.ndarray:
            step = self.ratio * array.itemsize
            return as_strided(array[at * self.ratio :], sizes, [s * step for s in self.strides])

        return elements, shadow

    def inside(self, coordinates: Sequence[int], bits: np.ndarray) -> Any:
        """Return an index of the elements of a box that lie inside the tensor."""
        found = self._inside(coordinates, bits.reshape(bits.shape[-len(self.shape) :]).shape)
        return slice(0) if found is None else found[2]

    def read(
        self, memory: GlobalMemory, coordinates: Sequence[int], who: Toucher, box: tuple[int, ...] | None = None
    ) -> np.ndarray:
        """Read the bits of a box, of the descriptor's shape or another."""
        bits = np.full(box or self.box, self.outside, self.elements.dtype)
        inside = self._inside(coordinates, bits.shape)
        if inside is not None:
            first, sizes, where = inside
            at, wrong = self._at(first, sizes, who, "reads")
            if wrong:
                memory.findings.add(Finding("OutOfBounds", wrong, (who.place,), self.buffer.name))
                return bits
            elements, shadow = self._part(sizes, at)
            memory.touch(self.buffer, ..., who, "read", shadow)
            bits[where] = elements
        return (bits.view(np.uint32) + 0x1000 & 0xFFFFE000).view(bits.dtype) if self.tf32 else bits

    def read_pixels(
        self, memory: GlobalMemory, first: Sequence[int], offsets: Sequence[int], who: Toucher
    ) -> np.ndarray:
        """Read the bits [pixels, channels] at `offsets` from the pixels of the box, from `first` on: along the last
        spatial dimension, then along those before it, then in the next batch entry."""
        assert self.pixels is not None
        count, channels = self.box
        batch, *at, channel = (int(n) for n in first)
        lower, upper, steps = self.pixels
        ends = [n - 1 + u for n, u in zip(self.shape[1:-1], upper, strict=True)]
        rows = []
        for _ in range(count):
            place = (batch, *(a + int(o) for a, o in zip(at, offsets, strict=True)), channel)
            rows.append(self.read(memory, place, who, (*(1 for _ in place[:-1]), channels)).reshape(channels))
            for i in reversed(range(len(at))):
                at[i] += steps[1 + i]
                if at[i] <= ends[i]:
                    break
                at[i] = lower[i]
            else:
                batch += steps[0]
        return np.stack(rows)

    def write(
        self,
        memory: GlobalMemory,
        coordinates: Sequence[int],
        bits: np.ndarray,
        who: Toucher,
        box: tuple[int, ...] | None = None,
        update: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None,
        how: str = "write",
    ) -> None:
        """Store the bits of a box, of the descriptor's shape or another, or `update` each element atomically; `how` is
        the kind of access."""
        inside = self._inside(coordinates, box or self.box)
        if inside is not None:
            first, sizes, where = inside
            at, wrong = self._at(first, sizes, who, "writes" if update is None else "updates")
            if wrong:
                memory.findings.add(Finding("OutOfBounds", wrong, (who.place,), self.buffer.name))
                return
            elements, shadow = self._part(sizes, at)
            memory.touch(self.buffer, ..., who, how, shadow)
            part = bits.reshape(box or self.box)[where]
            elements[...] = part if update is None else update(elements.copy(), part.copy())


def make_descriptor(
    memory: GlobalMemory, address: int, shape: Sequence[int], strides: Sequence[int], kind: Type, nan: bool = False
) -> Descriptor:
    """Make a descriptor of the tensor at an address, inside one buffer."""
    buffer = memory.find(address)
    if buffer is None:
        raise SimulationError(f"a tensor descriptor points to {address:#x}, which belongs to no argument")
    offset = address - buffer.base
    last = offset + (1 + sum((int(n) - 1) * int(s) for n, s in zip(shape, strides, strict=False))) * kind.itemsize
    if offset < 0 or last > buffer.nbytes:
        raise SimulationError(
            f"a tensor descriptor of {buffer.name} covers bytes {offset}..{last}, and there are {buffer.nbytes}"
        )
    fault = misaligned(buffer.address + offset, strides, kind.itemsize)
    if fault:
        raise SimulationError(f"a tensor descriptor of {buffer.name} has {fault}")
    return Descriptor(buffer, offset, shape, strides, kind, nan)


def misaligned(address: int, strides: Sequence[int], itemsize: int) -> str:
    """Say which address or stride (in elements) of a tensor TMA cannot take; empty if it can."""
    if address % _ALIGNMENT:
        return f"the address {address}; TMA takes multiples of {_ALIGNMENT} bytes"
    steps = [int(stride) * itemsize for stride in strides[:-1] if int(stride) * itemsize % _ALIGNMENT]
    return f"a stride of {steps[0]} bytes; TMA takes multiples of {_ALIGNMENT}" if steps else ""
