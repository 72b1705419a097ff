"""Computes which bytes of LDS an instruction touches: a set of words per wave, as bits of a number.

    copy to LDS   m0 + offset + lane × size      one run of bytes for each wave
    ds_read       address[lane] + offset         at each lane's address
"""

from __future__ import annotations

import re

import numpy as np

from .arithmetic import Value
from .demand import ADDRESS
from .text import LANES, Instruction

_WORD = 4
_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8, "96": 12, "128": 16}
_OFFSETS_AND_SIZE = re.compile(r"ds_(?:read|write|\w+?)(2st64|2)?_(?:rtn_)?[biuf](\d+)")
_PER_LANE = {"x2": 8, "x3": 12, "x4": 16}

Words = tuple[int, ...]  # of each wave


class Footprints:
    """Numbers sets of words, so that machine states are small and equal sets have equal numbers."""

    def __init__(self, waves: int) -> None:
        self.waves = waves
        self._sets: list[Words] = []
        self._numbers: dict[Words, int] = {}
        self._touched: dict[tuple, int] = {}
        self._overlaps: dict[tuple[int, int], tuple[bool, bool]] = {}
        self.everything = self._kept(((1 << (ADDRESS + 1) // _WORD) - 1,) * waves)

    def _kept(self, words: Words) -> int:
        number = self._numbers.setdefault(words, len(self._sets))
        if number == len(self._sets):
            self._sets.append(words)
        return number

    def of(self, instruction: Instruction, address: Value | None) -> int:
        """Return the number of the set that `instruction` touches; all of LDS if its address is unknown."""
        if address is None:
            return self.everything
        key = (instruction.name, instruction.modifiers, address.tobytes())
        if key not in self._touched:
            starts, size = _copied(instruction, address) if instruction.to_lds else _accessed(instruction, address)
            self._touched[key] = self._kept(_words(np.broadcast_to(starts, (self.waves, starts.shape[1])), size))
        return self._touched[key]

    def overlap(self, first: int, second: int) -> tuple[bool, bool]:
        """Whether two sets have words in common, of (any waves, different waves)."""
        key = (first, second)
        if key not in self._overlaps:
            a, b = self._sets[first], self._sets[second]
            met = [(i, j) for i, x in enumerate(a) for j, y in enumerate(b) if x & y]
            self._overlaps[key] = bool(met), any(i != j for i, j in met)
        return self._overlaps[key]


def _copied(instruction: Instruction, base: Value) -> tuple[np.ndarray, int]:
    found = next((size for suffix, size in _PER_LANE.items() if instruction.name.endswith(suffix)), _WORD)
    return base.astype(np.int64)[:, :1] + instruction.number("offset"), found * LANES


def _accessed(instruction: Instruction, address: Value) -> tuple[np.ndarray, int]:
    told = _OFFSETS_AND_SIZE.match(instruction.name)
    if told is None:
        raise ValueError(f"line {instruction.line}: the size of {instruction.name} is not known")
    pair, size = told.group(1), _SIZES[told.group(2)]
    starts = address.astype(np.int64)
    if pair is None:
        return starts + instruction.number("offset"), size
    step = size * (64 if pair == "2st64" else 1)
    offsets = [instruction.number(name) * step for name in ("offset0", "offset1")]
    return np.hstack([starts + offset for offset in offsets]), size


def _words(starts: np.ndarray, size: int) -> Words:
    """Make one set per wave; `starts` are bytes, (waves, any)."""
    found = []
    for row in starts & ADDRESS:
        bits = np.zeros((ADDRESS + 1) // _WORD + size, np.uint8)
        first = row // _WORD
        for i in range(-(-size // _WORD)):
            bits[first + i] = 1
        found.append(int.from_bytes(np.packbits(bits, bitorder="little").tobytes(), "little"))
    return tuple(found)
