"""Which CTA of a cluster holds which part of a tensor, from its layout.

CGALayout = [[1, 0]]    bit 0 of the CTA selects a half of the rows
CGALayout = [[0, 0]]    both CTAs hold the whole (a copy each)
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..errors import SimulationError
from .valuetypes import Type, split_top

_ENCODING = re.compile(r"^(#\S+) = (#\S+<.*>)\s*$", re.MULTILINE)
_BASES = re.compile(r"\b(CGALayout|block) = \[((?:\[[-\d, ]*\](?:, )?)*)\]")


class Split(NamedTuple):
    """How a tensor is split: the part that each bit of the CTA selects; how many parts each dimension has."""

    bases: tuple[tuple[int, ...], ...]
    parts: tuple[int, ...]

    @property
    def copies(self) -> int:
        """The bits of the CTA that select no part: CTAs that differ only there hold copies."""
        return sum(1 << i for i, basis in enumerate(self.bases) if not any(basis))

    def local(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a part."""
        return tuple(n // p for n, p in zip(shape, self.parts, strict=True))

    def own(self, shape: tuple[int, ...], cta: int) -> tuple[slice, ...]:
        """Return the part of a CTA."""
        at = [0] * len(shape)
        for i, basis in enumerate(self.bases):
            if cta >> i & 1:
                at = [a ^ b for a, b in zip(at, basis, strict=True)]
        return tuple(slice(a * n, (a + 1) * n) for a, n in zip(at, self.local(shape), strict=True))


@dataclass(frozen=True)
class Ctas:
    """The cluster that a module is compiled for."""

    count: int
    pairs: bool  # two CTAs compute each product
    names: dict[str, str] = field(hash=False)  # layout name -> layout

    @property
    def bits(self) -> int:
        return self.count.bit_length() - 1

    def split(self, kind: Type) -> Split:
        """Return how a tensor, tile or box of a type is split over the CTAs."""
        shape = kind.shape
        if shape is None:
            return Split(((),) * self.bits, ())
        parts = split_top(kind.text.partition("<")[2][:-1])
        key, bases = self._bases(parts[1] if len(parts) > 1 else "")
        if len(bases) != self.bits:
            raise SimulationError(f"the type {kind} does not say how its elements are spread over the CTAs")
        bases = [(0,) * (len(shape) - len(basis)) + basis for basis in bases]
        return _split(shape, bases, key == "block", kind)

    def _bases(self, layout: str) -> tuple[str, list[tuple[int, ...]]]:
        text = self.names.get(layout, layout)
        if text.startswith(("#ttg.slice<", "#ttg.dot_op<")):
            parent = re.search(r"parent = (#.*?)(?:, kWidth = \d+)?\}>$", text)
            key, bases = self._bases(parent[1] if parent else "")
            found = re.search(r"\b(dim|opIdx) = (\d)", text)
            if found is not None and found[1] == "dim":
                dim = int(found[2])
                return key, [basis[:dim] + basis[dim + 1 :] for basis in bases]
            k = 1 if found is None or found[2] == "0" else 0
            return key, [tuple(0 if d == k else x for d, x in enumerate(basis)) for basis in bases]
        found = _BASES.search(text)
        if found is None:
            return "", []
        lists = re.findall(r"\[([-\d, ]*)\]", found[2])
        return found[1], [tuple(int(n) for n in each.split(",") if n.strip()) for each in lists]

    def local(self, kind: Type) -> Type:
        """Return the type of one CTA's part of a tile."""
        if not kind.shape:
            return kind
        shape = self.split(kind).local(kind.shape)
        before, after = ("".join(f"{n}x" for n in each) for each in (kind.shape, shape))
        return replace(kind, shape=shape, text=kind.text.replace(before, after, 1))


def _split(shape: tuple[int, ...], bases: list[tuple[int, ...]], elements: bool, kind: Type) -> Split:
    """Convert bases to parts; `elements`: they are given in elements."""
    if elements:
        bases = [tuple(x % n for x, n in zip(basis, shape, strict=True)) for basis in bases]
    counts = [1 << sum(1 for basis in bases if basis[d]) for d in range(len(shape))]
    for d, (n, count) in enumerate(zip(shape, counts, strict=True)):
        if n < count:
            bases = [(*basis[:d], 0, *basis[d + 1 :]) for basis in bases]
            counts[d] = 1
    if elements:
        units = [n // count for n, count in zip(shape, counts, strict=True)]
        if any(x % unit for basis in bases for x, unit in zip(basis, units, strict=True)):
            raise SimulationError(
                f"the type {kind} deals its elements out to the CTAs one by one: this is not simulated"
            )
        bases = [tuple(x // unit for x, unit in zip(basis, units, strict=True)) for basis in bases]
    if any(x >= count for basis in bases for x, count in zip(basis, counts, strict=True)):
        raise SimulationError(f"how the type {kind} is spread over the CTAs is not simulated")
    return Split(tuple(bases), tuple(counts))


def ctas_of(text: str, count: int) -> Ctas:
    """Read the cluster of a module's text."""
    pairs = re.search(r'"ttng.two-ctas" = true', text) is not None
    return Ctas(count, pairs, layouts_of(text))


def layouts_of(text: str) -> dict[str, str]:
    """Read the layouts that a module's text names."""
    return dict(_ENCODING.findall(text))


def group(cta: int, bits: int) -> list[int]:
    """Return the CTAs that differ from `cta` only in `bits`."""
    return [cta & ~bits | each for each in range(bits + 1) if each & ~bits == 0]
