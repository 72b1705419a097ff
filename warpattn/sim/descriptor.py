"""TMA descriptors: a tensor in global memory seen through a box.

Reading takes the part of the box that lies inside the tensor and fills the rest with zeros; writing drops what lies
outside. Strides are in elements, the last one is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from .errors import SimulationError
from .formats import memory_dtype
from .globalmem import GlobalBuffer, GlobalMemory, Toucher
from .valuetypes import Type


@dataclass(frozen=True)
class TensorDescriptor:
    """What the caller passes for a descriptor argument: a tensor, and optionally the shape of its box."""

    tensor: Any
    box: tuple[int, ...] | None = None


class Descriptor:
    """A descriptor inside a run."""

    def __init__(
        self, buffer: GlobalBuffer, offset: int, shape: Sequence[int], strides: Sequence[int], kind: Type
    ) -> None:
        self.buffer, self.kind = buffer, kind
        self.shape = tuple(int(n) for n in shape)
        self.box = kind.shape or ()
        size = kind.itemsize
        whole = buffer.nbytes // size * size
        elements = buffer.bytes[:whole].view(memory_dtype(kind.elem))[offset // size :]
        self.elements = as_strided(elements, self.shape, [int(s) * size for s in strides])
        self.at = offset // size
        self.strides = tuple(int(s) for s in strides)
        self.ratio = size // buffer.granule

    def _inside(
        self, coordinates: Sequence[int], box_shape: Sequence[int]
    ) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """Slices of the tensor and of the box where they meet; None if they do not."""
        tensor, box = [], []
        for start, n, extent in zip(coordinates, box_shape, self.shape, strict=False):
            low, high = max(0, int(start)), min(int(start) + n, extent)
            if low >= high:
                return None
            tensor.append(slice(low, high))
            box.append(slice(low - int(start), high - int(start)))
        return tuple(tensor), tuple(box)

    def _shadow(self, array: np.ndarray) -> np.ndarray:
        cells = array[self.at * self.ratio :]
        step = self.ratio * array.itemsize
        return as_strided(cells, self.shape, [s * step for s in self.strides])

    def read(
        self, memory: GlobalMemory, coordinates: Sequence[int], who: Toucher, box: tuple[int, ...] | None = None
    ) -> np.ndarray:
        """The bits of a box, of the descriptor's shape or another."""
        bits = np.zeros(box or self.box, self.elements.dtype)
        inside = self._inside(coordinates, bits.shape)
        if inside is not None:
            memory.touch(self.buffer, inside[0], who, "read", self._shadow)
            bits[inside[1]] = self.elements[inside[0]]
        return bits

    def write(
        self,
        memory: GlobalMemory,
        coordinates: Sequence[int],
        bits: np.ndarray,
        who: Toucher,
        box: tuple[int, ...] | None = None,
    ) -> None:
        """Store the bits of a box, of the descriptor's shape or another."""
        inside = self._inside(coordinates, box or self.box)
        if inside is not None:
            memory.touch(self.buffer, inside[0], who, "write", self._shadow)
            self.elements[inside[0]] = bits.reshape(box or self.box)[inside[1]]


def make_descriptor(
    memory: GlobalMemory, address: int, shape: Sequence[int], strides: Sequence[int], kind: Type
) -> Descriptor:
    """A descriptor of the tensor at an address; it must lie inside one buffer."""
    buffer = memory.find(address)
    if buffer is None:
        raise SimulationError(f"a tensor descriptor points to {address:#x}, which belongs to no argument")
    offset = address - buffer.base
    last = offset + (1 + sum((int(n) - 1) * int(s) for n, s in zip(shape, strides, strict=False))) * kind.itemsize
    if offset < 0 or last > buffer.nbytes:
        raise SimulationError(
            f"a tensor descriptor of {buffer.name} covers bytes {offset}..{last}, and there are {buffer.nbytes}"
        )
    return Descriptor(buffer, offset, shape, strides, kind)
