"""Tensor memory (sm_100): 128 lanes of 512 columns of 32 bits, and tiles on it as views of the same bytes.

    lane  0 ┌ column 0 ─────────────── S: 128x128 f32 ────────────────┐ column 127
     …      │ P: 128x128 f16 over it, columns 0..63 │ scale: 128x1 f32 │
    lane 127└─────────────────────────────────────────────────────────┘

A tile's rows and columns are mixed-radix digits, each with a step in bytes, so that every layout is one strided array:
128 rows (one lane each) or 64 (16 lanes of every 32; the other half holds what lies beyond 64 rows or
beyond blockN columns), packed elements or one per 32-bit column. Slices and re-interpretations are other digits on the
same bytes. Accesses are recorded as for shared memory, but by lane and column. Fences are those of tcgen05, and only
kernels that have any need them: Triton itself writes none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..errors import SimulationError
from ..ir.formats import memory_dtype
from ..ir.module import Module
from ..ir.valuetypes import Type, parse_type, split_top
from .clocks import ADMITTED, SIGNALLED, Clock
from .findings import Findings
from .shared import POISON, Access, Missing, SharedBuffer

LANES, COLUMNS = 128, 512
_SCALES = "tensor_memory_scales_encoding<>"
_SCALE_ROWS, _SCALES_A_COLUMN = 32, 4
_FENCE = "tcgen05.fence::"
_PAIRED = "twoCTAs = true"  # a product of two CTAs: each has its 128 rows as without
_HALF = 16  # lanes that a tile of 64 rows uses of every 32
_GROUPS = LANES // _HALF
_ENCODING = re.compile(r"^(#\S+) = (#ttng\.tensor_memory\w*<.*>)\s*$", re.MULTILINE)

Digits = tuple[tuple[int, int], ...]  # (extent, step in bytes), the most significant first


class Layout(NamedTuple):
    """How Triton spreads a tile: blocks of rows and columns, and 32-bit columns per element if they are not packed."""

    block_m: int
    block_n: int
    stride: int


# Of scales [M, K]: 32 rows, one lane each, and four of K in a column; copies in the other lanes are not modelled.
SCALES = Layout(_SCALE_ROWS, _SCALES_A_COLUMN, 1)


@lru_cache(64)
def layouts(text: str) -> dict[str, str]:
    """Return a module's layouts of tensor memory by name."""
    return dict(_ENCODING.findall(text))


@lru_cache(64)
def has_fences(text: str) -> bool:
    """Whether a module orders accesses of tensor memory by fences."""
    return _FENCE in text


def layout_of(kind: Type, names: dict[str, str]) -> Layout:
    """Return the layout in a type of tensor memory."""
    name = split_top(kind.text.partition("<")[2][:-1])[1]
    text = names.get(name, name)
    if _SCALES in text:
        return SCALES
    numbers = {key: int(value) for key, value in re.findall(r"(\w+) = (\d+)", text)}
    if (
        "tensor_memory_encoding" not in text
        or set(numbers) != {"blockM", "blockN", "colStride"}
        or "true" in text.replace(_PAIRED, "")
    ):
        raise SimulationError(f"the tensor-memory layout {text} is not simulated")
    if _PAIRED in text and numbers["blockM"] != LANES:
        raise SimulationError(f"the tensor-memory layout {text} is not simulated")
    return Layout(numbers["blockM"], numbers["blockN"], numbers["colStride"])


def tile(shape: tuple[int, ...], itemsize: int, layout: Layout, pitch: int) -> tuple[list[Digits], int]:
    """Return (digits per dimension, bytes per lane) of a tile [..., M, N] in rows of `pitch` bytes."""
    *stages, m, n = shape
    if layout == SCALES:
        return _scales(stages, m, n, pitch)
    unit = itemsize * layout.stride
    block_m, block_n = layout.block_m, min(layout.block_n, n)
    rows: list[tuple[int, int]] = [(block_m, pitch)]
    columns: list[tuple[int, int]] = [(block_n, unit)]
    if block_m == 64:
        rows = [(4, 2 * _HALF * pitch), (_HALF, pitch)]
        if m > block_m:
            rows.insert(0, (2, _HALF * pitch))
        elif n > block_n:
            columns.insert(0, (2, _HALF * pitch))
    repeat_m, repeat_n = (
        size // math.prod(extent for extent, _ in digits) for size, digits in ((m, rows), (n, columns))
    )
    rows.insert(0, (repeat_m, block_n * unit))
    columns.insert(0, (repeat_n, repeat_m * block_n * unit))
    nbytes = repeat_m * repeat_n * block_n * unit
    digits = [tuple(d for d in dim if d[0] > 1) or ((1, 0),) for dim in (rows, columns)]
    for stage in reversed(stages):
        digits.insert(0, ((stage, nbytes),))
        nbytes *= stage
    return digits, nbytes


def _scales(stages: list[int], m: int, n: int, pitch: int) -> tuple[list[Digits], int]:
    """Do the same for scales [..., M, K]: for each four along K first all rows, 32 in a column; fewer leave a gap."""
    lanes, inner = min(m, _SCALE_ROWS), min(n, _SCALES_A_COLUMN)
    if m % lanes or n % inner:
        raise SimulationError(f"scales of {m}x{n} in tensor memory are not simulated: multiples of 32 and 4 are")
    blocks, groups = m // lanes, n // inner
    nbytes = blocks * groups * _SCALES_A_COLUMN
    rows: Digits = ((blocks, _SCALES_A_COLUMN), (lanes, pitch))
    columns: Digits = ((groups, blocks * _SCALES_A_COLUMN), (inner, 1))
    digits = [rows, columns]
    for stage in reversed(stages):
        digits.insert(0, ((stage, nbytes),))
        nbytes *= stage
    return digits, nbytes


def columns_of(kind: Type, names: dict[str, str]) -> int:
    """Return how many columns a tile of a type takes."""
    return -(-tile(kind.shape or (), kind.itemsize, layout_of(kind, names), 0)[1] // 4)


class TensorBuffer(SharedBuffer):
    """One allocation of tensor memory of a program."""

    def __init__(self, name: str, kind: Type, module: Module, findings: Findings) -> None:
        self.name, self.findings, self.names = name, findings, layouts(module.text)
        self.columns = columns_of(kind, self.names)
        self.nbytes = LANES * 4 * self.columns
        self.data = np.full((module.num_ctas, LANES, 4 * self.columns), POISON, np.uint8)
        self.written = np.zeros_like(self.data)
        self.records, self.views, self.fault = [], [], None
        self.barriers, self.rivals = {}, []
        self.fences = has_fences(module.text)

    def view(self, kind: Type, start: int = 0) -> TensorView:
        """Return the tile of a type, from a byte of the first lane on."""
        digits, nbytes = tile(kind.shape or (), kind.itemsize, layout_of(kind, self.names), 4 * self.columns)
        if start % (4 * self.columns) + nbytes > 4 * self.columns:
            raise SimulationError(
                f"a tile of {nbytes // 4} columns at column {start % (4 * self.columns) // 4} of {self.name} does not "
                f"fit into its {self.columns} columns"
            )
        return TensorView(self, kind.elem, start, digits)

    def unwritten(self, access: Access) -> Missing | None:
        """The elements [M, N] of a tile that were never written."""
        missing = super().unwritten(access)
        return None if missing is None else missing.at(missing.where.reshape(access.view.shape))

    def read(self, access: Access, clock: Clock) -> tuple[np.ndarray, Missing | None]:
        """Read the bits of a tile [M, N]; return them and which were never written."""
        bits, missing = super().read(access, clock)
        return bits.reshape(access.view.shape), missing

    def write(self, access: Access, clock: Clock, bits: Any, missing: Missing | None = None) -> None:
        """Store bits [M, N] into a tile, checked."""
        digits = access.view.array.shape[1:]
        missing = None if missing is None else missing.at(np.reshape(missing.where, digits))
        super().write(access, clock, np.reshape(bits, digits), missing)

    def _fence(self, new: Access, old: Access, clock: Clock) -> None:
        """A signal orders accesses between a fence before the arrival and one after the wait; a commit is the former,
        too."""
        if not self.fences or clock.knows(old.lane, old.epoch, ADMITTED):
            return
        if clock.knows(old.lane, old.epoch, SIGNALLED):
            lacks = f"{new.place.role} has no tcgen05.fence::after_thread_sync behind its wait"
        else:
            lacks = f"{old.place.role} has no tcgen05.fence::before_thread_sync before its signal"
        text = f"{new.place} reaches {new.view.extent} of {self.named(new)} after {old.place} did; {lacks}"
        self.findings.add(self._conflict("MissingFence", text, new, old))


class TensorView:
    """A tile of tensor memory, with the interface of a MemDesc, in columns instead of bytes."""

    def __init__(self, buffer: TensorBuffer, elem: str, start: int, digits: list[Digits]) -> None:
        self.buffer, self.elem, self.start, self.digits = buffer, elem, start, digits
        flat = [digit for dim in digits for digit in dim]
        extents, steps = (tuple(part) for part in zip(*flat, strict=True))
        dtype = np.dtype(memory_dtype(elem))

        def strided(raw: np.ndarray, dtype: np.dtype) -> np.ndarray:
            shape, strides = (raw.shape[0], *extents), (raw.strides[0], *steps)
            return np.ndarray(shape, dtype, raw.data, start, strides)

        self.array = strided(buffer.data, dtype)
        self.written = strided(buffer.written, np.dtype(f"u{dtype.itemsize}"))
        self.cells = _cells(buffer.columns, start, tuple(digits), dtype.itemsize)
        columns = np.flatnonzero(self.cells.any(axis=0))
        self.low, self.high = int(columns[0]), int(columns[-1]) + 1
        self.mask = int.from_bytes(np.packbits(self.cells).tobytes(), "big")
        self.known = [False] * len(self.array)
        self._children: dict[Any, TensorView] = {}
        self.stray = ""
        buffer.views.append(self)  # pyright: ignore[reportArgumentType]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(extent for extent, _ in dim) for dim in self.digits)

    @property
    def extent(self) -> str:
        """What messages call the place of this view."""
        lanes = np.flatnonzero(self.cells.any(axis=1)) * _HALF
        return f"lanes {lanes[0]}..{lanes[-1] + _HALF}, columns {self.low}..{self.high}"

    def meets(self, other: TensorView) -> bool:
        """Whether the two tiles have a cell in common."""
        return bool(self.mask & other.mask)

    def covers(self, other: TensorView) -> bool:
        """Whether this tile holds every cell of the other."""
        return not other.mask & ~self.mask

    def outside(self, i: int) -> TensorView:
        """Tile `i`, which the buffer does not have: a fault only if something accesses it."""
        tiles = self.shape[0]
        tile = self.sliced(0, i % tiles, 1)
        child = TensorView(self.buffer, self.elem, tile.start, tile.digits[1:])
        child.stray = self.stray or f"tile {i} of {self.buffer.name}, which has {tiles}"
        return child

    def derived(self, key: Any, change: Callable[[np.ndarray], np.ndarray], elem: str | None = None) -> TensorView:
        """Return the tile that the operation named by `key` makes of this one."""
        child = self._children.get(key)
        if child is None:
            if key[0] == "index":
                child = self.sliced(0, key[1], 1)
                child = TensorView(self.buffer, self.elem, child.start, child.digits[1:])
            elif key[0] == "reinterpret":
                child = self.buffer.view(parse_type(key[1]), self.start)
            else:
                raise SimulationError(f"{key[0]} of tensor memory ({self.buffer.name}) is not simulated")
            child.stray = self.stray
            self._children[key] = child
        return child

    def sliced(self, dim: int, start: int, length: int) -> TensorView:
        """Take indices start..start+length of a dimension."""
        key = ("slice", dim, start, length)
        if key not in self._children:
            offset, digits = _range(self.digits[dim], start, length, self.buffer.name)
            parts = [*self.digits[:dim], digits, *self.digits[dim + 1 :]]
            self._children[key] = TensorView(self.buffer, self.elem, self.start + offset, parts)
            self._children[key].stray = self.stray
        return self._children[key]


@lru_cache(1024)
def _cells(columns: int, start: int, digits: tuple[Digits, ...], itemsize: int) -> np.ndarray:
    """Return the cells (16 lanes of a column) of a tile in a buffer: [8, columns] of bool."""
    offsets = np.array([start])
    for extent, step in (digit for dim in digits for digit in dim):
        offsets = np.unique(offsets[:, None] + np.arange(extent) * step)
    pitch = 4 * columns
    cells = np.zeros((_GROUPS, columns), np.bool_)
    for last in (0, itemsize - 1):
        cells[offsets // pitch // _HALF, (offsets % pitch + last) // 4] = True
    return cells


def _range(digits: Digits, start: int, length: int, name: str) -> tuple[int, Digits]:
    """Return (bytes to its start, digits) of a range of indices."""
    offset = 0
    for i, (extent, step) in enumerate(digits):
        weight = math.prod(e for e, _ in digits[i + 1 :])
        if length >= weight and start % weight == 0 and length % weight == 0 and start // weight < extent:
            return offset + start // weight * step, ((length // weight, step), *digits[i + 1 :])
        if start // weight >= extent or start % weight + length > weight:
            break
        offset += start // weight * step
        start %= weight
    raise SimulationError(f"columns {start}..{start + length} of {name} are no tile of its layout")


