"""Matrix products and conversions of microscaled operands (OCP MX, nvfp4): blocks along K share a scale.

fp8 has one element per byte; e2m1 (fp4) two, the first in the low half. A scale is eight bits of exponent (e8m0), with
nvfp4 a number in e4m3. On sm_100 operands are in shared memory and scales in tensor memory; tcgen05 reads them when it
runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ..ir.formats import as_register, decode, encode, register_dtype, rounder
from ..ir.module import Op
from ..machine.agents import Agent
from ..machine.pending import poisoned
from ..machine.registry import acting, blocking, plain
from ..memory.shared import MemDesc, Missing, either, of_product
from ..memory.tensor_memory import TensorView
from .blackwell import asynchronous, commit, issue

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FP4 = np.concatenate([_E2M1, -_E2M1])


@plain("tt.dot_scaled")
def _dot_scaled(op: Op) -> Callable[..., Any]:
    left, right = _scaled(op)
    if "k_pack = false" in op.text:
        raise op.error("operands that are packed along rows or columns are not simulated")
    first, second, _ = op.text.split(",", 2)
    scaled = " scale %" in first, " scale %" in second
    dtype = register_dtype(op.outputs[0].elem)

    def run(*operands: Any) -> Any:
        rest = iter(operands)
        a, a_scale = next(rest), next(rest) if scaled[0] else None
        b, b_scale = next(rest), next(rest) if scaled[1] else None
        product = np.matmul(_values(a, left, a_scale), _values(b.T, right, b_scale).T)
        return np.asarray(product + next(rest), dtype)

    return run


def _scaled(op: Op) -> tuple[str, str]:
    """Return the formats of both operands."""
    spelled = re.search(r"lhs = (\w+) rhs = (\w+)", op.text)
    if spelled is None:
        raise op.error("the formats of its operands are not understood")
    return spelled[1], spelled[2]


@blocking("ttng.tc_gen5_mma_scaled")
def _mma_scaled(op: Op) -> Callable[..., Any]:
    """Operands: A, B, accumulator, [token], scales, whether to add, whether to run, (barrier, whether to commit)…"""
    left, right = _scaled(op)
    if op.flag("two_ctas"):
        raise op.error("a scaled product of two CTAs is not simulated")
    token = re.match(r"\s*%\S+ %\S+ %[^\s,\[]+\[%", op.text.replace(",", "")) is not None
    elem = op.inputs[2].elem

    def run(role: Any, a: Any, b: MemDesc, accumulator: TensorView, *rest: Any) -> Any:
        yield from role.run.pause()
        a_scale, b_scale, add, predicate, *barriers = rest[token:]
        if not predicate:
            return

        def read(view: Any, agent: Agent) -> tuple[np.ndarray, Missing | None]:
            bits, missing = view.buffer.read(asynchronous(view, False, agent), agent.clock)
            return decode(bits, view.elem), missing

        def body(agent: Agent) -> None:
            x, x_scale, y, y_scale = (read(view, agent) for view in (a, a_scale, b, b_scale))
            product = np.matmul(_values(x[0], left, x_scale[0]), _values(y[0].T, right, y_scale[0]).T)
            rows, columns = _rows(x[1], x_scale[1]), _rows(_turned(y[1]), y_scale[1])
            missing = of_product(rows, _turned(columns), product.shape)
            if add:
                total, total_missing = read(accumulator, agent)
                product, missing = product + total, either(missing, total_missing)
            bits = encode(np.asarray(product, np.float32), elem)
            accumulator.buffer.write(asynchronous(accumulator, True, agent), agent.clock, bits, missing)

        issue(role, "tcgen05 mma", body)
        for barrier, wanted in zip(barriers[::2], barriers[1::2], strict=True):
            if wanted:
                commit(role, barrier, 1)

    return run


def _rows(missing: Missing | None, scale: Missing | None) -> Missing | None:
    """Return the rows [rows, 1] of an operand with an undefined element or scale."""
    parts = [each.at(each.where.any(1, keepdims=True)) for each in (missing, scale) if each is not None]
    return either(*parts) if len(parts) == 2 else parts[0] if parts else None


def _turned(missing: Missing | None) -> Missing | None:
    return None if missing is None else missing.at(missing.where.T)


def _values(x: np.ndarray, name: str, scale: np.ndarray | None) -> np.ndarray:
    """Return an operand [rows, K] as numbers, with its scales [rows, K / block] applied."""
    if name == "e2m1":
        x = _FP4[_nibbles(x, 1)]
    if scale is None:
        return x
    return x * np.repeat(_factors(scale), x.shape[1] // scale.shape[1], 1)


def _nibbles(x: np.ndarray, axis: int) -> np.ndarray:
    """Unpack both halves of each byte, the low one first, along an axis."""
    codes = np.moveaxis(x.view(np.uint8), axis, -1)
    halves = np.stack((codes & 15, codes >> 4), -1).reshape(*codes.shape[:-1], -1)
    return np.moveaxis(halves, -1, axis)


def _factors(scale: np.ndarray) -> np.ndarray:
    """Return scales as numbers: unchanged (e4m3, or bf16 on gfx942), or decoded from e8m0."""
    if scale.dtype == np.float32:
        return scale
    codes = scale.view(np.uint8).astype(np.int32)
    return np.where(codes == 255, np.float32(np.nan), np.exp2((codes - 127).astype(np.float32)))


@plain("ttg.fp4_to_fp", "amdg.scaled_upcast_fp4", "amdg.scaled_upcast_fp8")
def _upcast(op: Op) -> Callable[..., Any]:
    """Convert packed fp4, or fp8, to wider floats, with a scale for each element or without."""
    packed, kind = "fp4" in op.name, op.outputs[0]
    axis, narrow = op.integer("axis", 0) if packed else 0, rounder(kind.elem)

    def run(x: np.ndarray, scale: np.ndarray | None = None) -> Any:
        value = _FP4[_nibbles(x, axis)] if packed else x
        value = value if scale is None else value * _factors(scale)
        return as_register(value if narrow is None else narrow(value), kind)

    return run


@acting("amdg.local_load_packed_transposed")
def _load_repacked(op: Op) -> Callable[..., Any]:
    """Load fp4 that is packed along rows or columns in shared memory, and pack it along K."""
    before, after = op.inputs[0].shape or (), op.outputs[0].shape or ()
    axes = [axis for axis, (n, m) in enumerate(zip(before, after, strict=True)) if n != m]
    if len(axes) != 2:
        raise op.error(f"a tile {before} packed anew as {after} is not understood")
    wide, packed = axes if before[axes[0]] < after[axes[0]] else axes[::-1]

    def run(role: Any, view: MemDesc) -> Any:
        bits, missing = view.buffer.read(role.access(view, False), role.clock)
        value = _packed(_nibbles(bits, wide), packed).view(np.int8)
        return value if missing is None else poisoned(value, missing.at(_repacked(missing.where, wide, packed)))

    return run


def _packed(codes: np.ndarray, axis: int) -> np.ndarray:
    """Pack neighbours along an axis into one byte, the first in the low half."""
    pairs = np.moveaxis(codes, axis, -1)
    return np.moveaxis(pairs[..., ::2] | pairs[..., 1::2] << 4, -1, axis)


def _repacked(where: np.ndarray, wide: int, packed: int) -> np.ndarray:
    """Return which bytes contain a half of a marked byte."""
    pairs = np.moveaxis(np.repeat(where, 2, wide), packed, -1)
    return np.moveaxis(pairs[..., ::2] | pairs[..., 1::2], -1, packed)
