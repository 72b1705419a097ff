"""The parts of an operation's tensors and tiles that one CTA of a cluster has, and functions that move them.

A register tensor has the shape of the whole tensor in every CTA, but loads fill only the CTA's own part: the rest is
NaN (or 0). A tile in memory has the size of a part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .module import Op
from .valuetypes import Type


def local(op: Op, kind: Type) -> Type:
    """Return the type of one CTA's part of a tile: without clusters the type itself."""
    return kind if op.ctas is None else op.ctas.local(kind)


def parts_of(op: Op, kind: Type) -> list[tuple[slice, ...]] | None:
    """Return the part of a tensor that each CTA has in registers; None if it is the whole."""
    if op.ctas is None or kind.shape is None:
        return None
    split = op.ctas.split(kind)
    return [split.own(kind.shape, cta) for cta in range(op.ctas.count)] if max(split.parts, default=1) > 1 else None


def to_registers(op: Op, kind: Type, tile: Type) -> Callable[[np.ndarray, int], np.ndarray]:
    """Return a function that loads a CTA's part of a tile into its part of a tensor."""
    parts = parts_of(op, kind)
    if parts is None:
        _same_shape(op, local(op, tile), kind.shape)
        return lambda value, cta: value
    shape, held = kind.shape or (), parts_of(op, tile)
    if held is not None and held != parts:
        raise op.error("the tile and the tensor are spread over the CTAs in different ways: this is not simulated")

    def spread(value: np.ndarray, cta: int) -> np.ndarray:
        whole = np.zeros(shape, value.dtype) if value.dtype.kind != "f" else np.full(shape, np.nan, value.dtype)
        whole[parts[cta]] = value if held is not None else value[parts[cta]]
        return whole

    return spread


def from_registers(op: Op, kind: Type, tile: Type) -> Callable[[Any, int], Any]:
    """Return a function that extracts from a tensor the part of a tile that a CTA stores."""
    parts, held = parts_of(op, kind), parts_of(op, tile)
    if parts is not None and held != parts:
        raise op.error("the tile and the tensor are spread over the CTAs in different ways: this is not simulated")
    if held is None:
        return lambda value, cta: value
    shape = kind.shape or ()
    return lambda value, cta: np.broadcast_to(value, shape)[held[cta]]


def _same_shape(op: Op, tile: Type, shape: tuple[int, ...] | None) -> None:
    if op.ctas is not None and tile.shape != shape:
        raise op.error("a CTA loads more of a tile than it has: this is not simulated")


def limited(op: Op, kind: Type, once: bool) -> Callable[[Any, int], Any] | None:
    """Return a function that limits an access mask to a CTA's part; `once`: only the first of equal parts counts."""
    if op.ctas is None or (kind.shape is None and not once):
        return None
    shape, split, parts = kind.shape or (), op.ctas.split(kind), parts_of(op, kind)
    copies = op.ctas.count - 1 if kind.shape is None else split.copies

    def limit(mask: Any, cta: int) -> Any:
        if once and cta & copies:
            return np.zeros(shape, np.bool_)
        if parts is None:
            return mask
        own = np.zeros(shape, np.bool_)
        own[parts[cta]] = True if mask is None else np.broadcast_to(mask, shape)[parts[cta]]
        return own

    return limit


def barrier_copies(op: Op, kind: Type) -> int:
    """Return the bits of the CTA that do not select a barrier: CTAs that differ in them share the first one's."""
    return 0 if op.ctas is None else op.ctas.split(kind).copies
