"""Reductions and scans along an axis with any combining function.

A combiner that is one operation of NumPy runs as such; any other is evaluated on whole slices, halving the axis, so it
costs a handful of array operations and not one per element.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce as fold
from typing import Any

import numpy as np

from ..ir.formats import as_register
from ..ir.module import Block, Op
from ..machine.interpreter import evaluate
from ..machine.registry import flow

_UFUNCS: dict[str, np.ufunc] = {
    "arith.addf": np.add, "arith.addi": np.add, "arith.mulf": np.multiply, "arith.muli": np.multiply,
    "arith.maxnumf": np.fmax, "arith.maximumf": np.maximum, "arith.minnumf": np.fmin, "arith.minimumf": np.minimum,
    "arith.maxsi": np.maximum, "arith.minsi": np.minimum, "arith.andi": np.bitwise_and, "arith.ori": np.bitwise_or,
    "arith.xori": np.bitwise_xor,
}  # fmt: skip
_UNROLLED = 8  # NumPy is slow on axes as short as this


def _ufunc(op: Op) -> np.ufunc | None:
    """Return the ufunc equal to the body, if that is a single operation of both arguments."""
    body = op.regions[0]
    narrow = any(kind.is_float and kind.bits < 32 for kind in op.inputs)
    if len(body.ops) != 2 or len(body.arguments) != 2 or narrow or op.inputs[0].elem == "i1":
        return None
    single = body.ops[0]
    straight = single.operands in (body.arguments, body.arguments[::-1]) and body.ops[1].operands == single.results
    return _UFUNCS.get(single.name) if straight else None


@flow("tt.reduce")
def _reduce(op: Op) -> Callable[..., Any]:
    axis, ufunc, body, ins = op.integer("axis"), _ufunc(op), op.regions[0], op.ins
    kinds = op.outputs

    def run(role: Any, registers: list[Any]) -> Any:
        values = [registers[i] for i in ins]
        if ufunc is not None:
            results = [_apply(ufunc, values[0], axis)]
        else:
            results = _halve(body, registers, [np.moveaxis(v, axis, 0) for v in values])
        results = [
            as_register(r if k.kind != "scalar" else r.reshape(())[()], k) for r, k in zip(results, kinds, strict=False)
        ]
        return results[0] if len(results) == 1 else results
        yield

    return run


def _apply(ufunc: np.ufunc, values: np.ndarray, axis: int) -> np.ndarray:
    n = values.shape[axis]
    if n > _UNROLLED:
        return ufunc.reduce(values, axis=axis, dtype=values.dtype)
    slices = np.moveaxis(values, axis, 0)
    return fold(ufunc, slices) if n > 1 else slices[0].copy()


def _halve(body: Block, registers: list[Any], values: list[np.ndarray]) -> list[np.ndarray]:
    while len(values[0]) > 1:
        half = len(values[0]) // 2
        rest = [v[2 * half :] for v in values]
        combined = evaluate(body, registers, [v[:half] for v in values] + [v[half : 2 * half] for v in values])
        values = [np.concatenate((c, r)) if len(r) else np.asarray(c) for c, r in zip(combined, rest, strict=False)]
    return [v[0] for v in values]


@flow("tt.scan")
def _scan(op: Op) -> Callable[..., Any]:
    axis, body, ins = op.integer("axis"), op.regions[0], op.ins
    backwards = "reverse = true" in op.text
    kinds = op.outputs

    def run(role: Any, registers: list[Any]) -> Any:
        values = [np.moveaxis(registers[i], axis, 0) for i in ins]
        if backwards:
            values = [v[::-1] for v in values]
        values = [v.copy() for v in values]
        step = 1
        while step < len(values[0]):  # Hillis and Steele: log2 n passes over the whole axis
            combined = evaluate(body, registers, [v[:-step] for v in values] + [v[step:] for v in values])
            values = [np.concatenate((v[:step], c)) for v, c in zip(values, combined, strict=False)]
            step *= 2
        if backwards:
            values = [v[::-1] for v in values]
        results = [as_register(np.moveaxis(v, 0, axis), k) for v, k in zip(values, kinds, strict=False)]
        return results[0] if len(results) == 1 else results
        yield

    return run


@flow("tt.map_elementwise")
def _map_elementwise(op: Op) -> Callable[..., Any]:
    pack = op.integer("pack", 1)
    body, ins, kinds = op.regions[0], op.ins, op.outputs
    if pack != 1:
        raise op.error(f"map_elementwise with pack={pack} depends on the layout and is not simulated")

    def run(role: Any, registers: list[Any]) -> Any:
        results = evaluate(body, registers, [registers[i] for i in ins])
        shaped = [as_register(np.broadcast_to(r, k.shape or ()), k) for r, k in zip(results, kinds, strict=False)]
        return shaped[0] if len(shaped) == 1 else shaped
        yield

    return run
