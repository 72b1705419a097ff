"""A rough model of how long things take on sm_90, for timelines: an estimate in cycles, calibrated against nothing yet.

    registers      128 lanes a cycle for a role of four warps, 16 for the special-function unit
    tensor core    2048 products of 16-bit operands a cycle and SM (989 TFLOP/s dense at 1.83 GHz, H100 data sheet)
    TMA            64 bytes a cycle and SM, 700 cycles until the first byte
    shared memory  128 bytes a cycle

A role's time goes on with every operation; a wait moves it to when what it waited for was there. Engines do one thing
at a time, in the gaps that are left, so the estimate hardly depends on the order in which the simulation ran them.
"""

from __future__ import annotations

import math
from bisect import insort
from typing import NamedTuple

from .ir import Op

LANES, SLOW_LANES = 128, 16
PRODUCTS = 2048
COPY_BYTES, COPY_LATENCY = 64, 700
PRODUCT_LATENCY = 30
_SHARED_BYTES = 128
_GLOBAL_LATENCY = 600
_SYNC = 20
_SLOW = {
    "math.exp",
    "math.exp2",
    "math.log",
    "math.log2",
    "math.sqrt",
    "math.rsqrt",
    "math.sin",
    "math.cos",
    "arith.divf",
}
_FREE = {
    "tt.reshape", "tt.broadcast", "tt.expand_dims", "tt.splat", "tt.split", "tt.join", "tt.trans", "arith.constant",
    "ttg.convert_layout", "tt.bitcast", "tt.make_range",
}  # fmt: skip


class Event(NamedTuple):
    """A stretch of time on a lane of the timeline, in cycles."""

    program: str
    lane: str
    name: str
    start: float
    end: float
    kind: str  # work, wait, copy or product


class Engine:
    """A unit of the chip that does one thing at a time."""

    def __init__(self) -> None:
        self._busy: list[tuple[float, float]] = []

    def place(self, earliest: float, duration: float) -> float:
        """Start of the first gap of `duration` from `earliest` on; the gap is taken."""
        start = earliest
        for low, high in self._busy:
            if high <= start:
                continue
            if low >= start + duration:
                break
            start = high
        insort(self._busy, (start, start + duration))
        if len(self._busy) > 64:  # the far past is never asked for again
            del self._busy[0]
        return start


def cost(op: Op) -> float:
    """Cycles of an operation for a role of four warps."""
    kind = op.outputs[0] if op.outputs else op.inputs[0] if op.inputs else None
    if op.name in _FREE or op.name.startswith("scf."):
        return 0.0
    if op.name.startswith(("ttng.", "ttg.inline_asm", "ttg.async")):
        return float(_SYNC)
    if op.name.startswith("tt.atomic") or op.name == "tt.load":
        return float(_GLOBAL_LATENCY)
    elements = math.prod(kind.shape or ()) if kind is not None and kind.shape is not None else 1
    if op.name in ("ttg.local_load", "ttg.local_store") and kind is not None:
        return 30 + elements * kind.itemsize / _SHARED_BYTES
    if op.name == "tt.reduce":
        elements = math.prod(op.inputs[0].shape or ())
    return max(1.0, elements / (SLOW_LANES if op.name in _SLOW else LANES))


def product_cycles(m: int, n: int, k: int, bits: int) -> float:
    """Cycles of a matrix product on the tensor core; the rate doubles as the operands' width halves."""
    return m * n * k / (PRODUCTS * 16 / bits)
