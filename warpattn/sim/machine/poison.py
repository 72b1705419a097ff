"""Propagates undefined elements, which were never written, through operations.

Elementwise arithmetic, selections, moves and reductions carry them on; a store that masks them off drops them. Any
other operation uses them, which is a finding.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..ir.module import Op
from ..memory.shared import Missing, either
from .pending import Poisoned, Unusable, opened, poisoned

_ELEMENTWISE = (
    "arith.", "math.", "tt.fp_to_fp", "tt.bitcast", "tt.elementwise_inline_asm", "ttng.packed_arith", "tt.clampf",
    "tt.precise_", "tt.approx_", "tt.addptr", "tt.int_to_fp", "tt.mulhiui", "tt.extern_elementwise",
)  # fmt: skip
MOVING = {
    "tt.splat", "tt.unsplat", "tt.expand_dims", "tt.reshape", "tt.broadcast", "tt.trans", "tt.split", "tt.join",
    "tt.cat", "ttg.convert_layout", "amdg.extract_slice", "amdg.in_thread_transpose",
}  # fmt: skip
_STORES = {"tt.store": (1, 2), "amdg.buffer_store": (0, 3)}  # operand numbers of values and mask


def carried(op: Op, values: list[Any]) -> Any:
    """Compute an operation's result with undefined elements; None if it uses such elements."""
    if any(isinstance(value, Unusable) and not isinstance(value, Poisoned) for value in values) or op.run is None:
        return None
    if not op.name.startswith(_ELEMENTWISE) and op.name not in MOVING:
        return None
    parts = [opened(value) for value in values]
    faults = [missing for _, missing in parts if missing is not None]
    plain = [value for value, _ in parts]
    result, made = opened(op.run(*plain))  # a division by zero may undo more elements
    masks = [np.zeros(np.shape(value), np.bool_) if missing is None else missing.where for value, missing in parts]
    if op.name in MOVING:
        moved = op.run(*masks)
        where = moved if isinstance(moved, tuple) else (moved,)
    else:
        where = (_selected(plain[0], masks) if op.name == "arith.select" else _anywhere(masks),)
    if made is not None:
        where = tuple(each | made.where for each in where)
    if not isinstance(result, tuple):
        return poisoned(result, faults[0].at(where[0]))
    return tuple(poisoned(r, faults[0].at(where[i % len(where)])) for i, r in enumerate(result))


def _anywhere(masks: list[np.ndarray]) -> np.ndarray:
    where = masks[0]
    for mask in masks[1:]:
        where = where | mask
    return where


def _selected(condition: Any, masks: list[np.ndarray]) -> np.ndarray:
    """An element is undefined if the selected one or the condition is."""
    return masks[0] | np.where(condition, masks[1], masks[2])


def reduced(op: Op, values: list[Any]) -> Missing | None:
    """Return the undefined elements of a reduction's results."""
    found = None
    for value in values:
        found = either(found, opened(value)[1])
    return None if found is None else found.at(found.where.any(op.integer("axis")))


def dropped(op: Op, values: list[Any]) -> bool:
    """Whether an operation is a store that masks every undefined element off."""
    if op.name not in _STORES:
        return False
    at, mask_at = _STORES[op.name]
    others = [value for i, value in enumerate(values) if i != at]
    if len(values) <= mask_at or any(isinstance(value, Unusable) for value in others):
        return False
    _, missing = opened(values[at])
    return missing is not None and not np.any(missing.where & np.asarray(values[mask_at], np.bool_))
