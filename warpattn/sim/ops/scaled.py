"""Matrix products of microscaled operands (OCP MX): blocks of elements along K share a scale that is a power of two.

fp8 stands one element to a byte; e2m1 (fp4) two, the first in the low half. A scale is eight bits of exponent (e8m0).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ..ir.formats import register_dtype
from ..ir.module import Op
from ..machine.registry import plain

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FP4 = np.concatenate([_E2M1, -_E2M1])


@plain("tt.dot_scaled")
def _dot_scaled(op: Op) -> Callable[..., Any]:
    spelled = re.search(r"lhs = (\w+) rhs = (\w+)", op.text)
    if spelled is None:
        raise op.error("the formats of its operands are not understood")
    left, right = spelled[1], spelled[2]
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


def _values(x: np.ndarray, name: str, scale: np.ndarray | None) -> np.ndarray:
    """An operand [rows, K] as numbers, with its scales [rows, K / block] applied."""
    if name == "e2m1":
        codes = x.view(np.uint8)
        x = np.stack((_FP4[codes & 15], _FP4[codes >> 4]), -1).reshape(x.shape[0], -1)
    if scale is None:
        return x
    codes = scale.view(np.uint8).astype(np.int32)
    factor = np.where(codes == 255, np.float32(np.nan), np.exp2((codes - 127).astype(np.float32)))
    return x * np.repeat(factor, x.shape[1] // scale.shape[1], 1)
