"""Arithmetic, comparisons, conversions and constants, on arrays and on scalars.

Floats narrower than 32 bits are computed in float32 and rounded once, which for + − × ÷ √ is the correctly rounded
result of the narrow format. Integers wrap around.
"""

from __future__ import annotations

import ast
import math
import operator
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from ..ir.formats import as_integers, as_register, bitcast, cut, register_dtype, rounder, unsigned, wrap
from ..ir.module import Op
from ..ir.valuetypes import Type, parse_type
from ..machine.pending import poisoned
from ..machine.registry import plain
from ..memory.findings import Finding, Place
from ..memory.shared import Missing

_ERF = np.vectorize(math.erf, otypes=[np.float64])


def _divide(a: Any, b: Any) -> Any:
    """Integer division towards zero; by zero gives zero."""
    safe = np.where(b == 0, 1, b)
    quotient = np.floor_divide(a, safe)
    return np.where(b == 0, 0, quotient + ((quotient < 0) & (quotient * safe != a)))


def _remainder(a: Any, b: Any) -> Any:
    return a - _divide(a, b) * b


def _scalar_divide(a: int, b: int) -> int:
    return 0 if b == 0 else (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)


def _shift(function: Callable[..., Any], fill: Callable[[Any], Any]) -> Callable[..., Any]:
    def shifted(a: Any, b: Any) -> Any:
        bits = 8 * np.asarray(a).dtype.itemsize
        small = (b >= 0) & (b < bits)
        return np.where(small, function(a, np.where(small, b, 0)), fill(a))

    return shifted


_FLOAT: dict[str, Callable[..., Any]] = {
    "arith.addf": np.add, "arith.subf": np.subtract, "arith.mulf": np.multiply, "arith.divf": np.divide,
    "arith.remf": np.fmod, "arith.negf": np.negative, "arith.maxnumf": np.fmax, "arith.minnumf": np.fmin,
    "arith.maximumf": np.maximum, "arith.minimumf": np.minimum, "math.exp": np.exp, "math.exp2": np.exp2,
    "math.log": np.log, "math.log2": np.log2, "math.log10": np.log10, "math.log1p": np.log1p, "math.expm1": np.expm1,
    "math.sqrt": np.sqrt, "math.rsqrt": lambda x: 1 / np.sqrt(x), "math.sin": np.sin, "math.cos": np.cos,
    "math.tan": np.tan, "math.tanh": np.tanh, "math.atan": np.arctan, "math.atan2": np.arctan2,
    "math.absf": np.abs, "math.floor": np.floor, "math.ceil": np.ceil, "math.trunc": np.trunc, "math.erf": _ERF,
    "math.fma": lambda a, b, c: np.float32(1) * (np.float64(a) * b + c), "math.powf": np.power,
    "math.copysign": np.copysign, "tt.precise_sqrt": np.sqrt, "tt.precise_divf": np.divide, "tt.approx_divf": np.divide,
    "tt.clampf": lambda x, low, high: np.fmin(np.fmax(x, low), high),
}  # fmt: skip

_INTEGER: dict[str, tuple[Callable[..., Any], Callable[..., Any] | None]] = {
    "arith.addi": (np.add, operator.add), "arith.subi": (np.subtract, operator.sub),
    "arith.muli": (np.multiply, operator.mul), "arith.divsi": (_divide, _scalar_divide),
    "arith.remsi": (_remainder, lambda a, b: a - _scalar_divide(a, b) * b),
    "arith.andi": (np.bitwise_and, operator.and_), "arith.ori": (np.bitwise_or, operator.or_),
    "arith.xori": (np.bitwise_xor, operator.xor), "arith.maxsi": (np.maximum, max), "arith.minsi": (np.minimum, min),
    "arith.floordivsi": (np.floor_divide, None),
    "arith.ceildivsi": (lambda a, b: np.floor_divide(a, b) + (np.mod(a, b) != 0), None),
    "math.absi": (np.abs, abs),
    "arith.shli": (_shift(np.left_shift, np.zeros_like), None),
    "arith.shrsi": (_shift(np.right_shift, lambda a: np.where(a < 0, -1, 0)), None),
}  # fmt: skip

_UNSIGNED: dict[str, Callable[..., Any]] = {
    "arith.divui": lambda a, b: np.where(b == 0, 0, a // np.where(b == 0, 1, b)),
    "arith.remui": lambda a, b: np.where(b == 0, a, a % np.where(b == 0, 1, b)),
    "arith.maxui": np.maximum, "arith.minui": np.minimum,
    "arith.ceildivui": lambda a, b: a // b + (a % b != 0),
    "arith.shrui": _shift(np.right_shift, np.zeros_like),
}  # fmt: skip


@plain(*_FLOAT)
def _float(op: Op) -> Callable[..., Any]:
    function, kind = _FLOAT[op.name], op.type
    narrow, dtype = rounder(kind.elem), register_dtype(kind.elem)
    if narrow is None and isinstance(function, np.ufunc):
        return function
    if narrow is None:
        return lambda *xs: as_register(function(*xs), kind)
    return lambda *xs: as_register(narrow(np.asarray(function(*xs)).astype(dtype, copy=False)), kind)


_DIVISIONS = {
    "arith.divsi", "arith.remsi", "arith.floordivsi", "arith.ceildivsi",
    "arith.divui", "arith.remui", "arith.ceildivui",
}  # fmt: skip


def _undefined_by_zero(op: Op, run: Callable[..., Any]) -> Callable[..., Any]:
    """Make results of a division by zero undefined: using one is a finding."""
    if op.name not in _DIVISIONS:
        return run

    def divided(a: Any, b: Any) -> Any:
        zero = b == 0
        if not np.any(zero):
            return run(a, b)
        fault = Finding("DivisionByZero", f"the integer division at {op.where} is by zero", (Place("", op.frames),))
        return poisoned(run(a, b), Missing(np.broadcast_to(zero, np.broadcast_shapes(np.shape(a), np.shape(b))), fault))

    return divided


@plain(*_INTEGER)
def _integer(op: Op) -> Callable[..., Any]:
    return _undefined_by_zero(op, _exact(op))


def _exact(op: Op) -> Callable[..., Any]:
    """Integer arithmetic that wraps around."""
    array, scalar = _INTEGER[op.name]
    kind = op.type
    if kind.kind == "scalar" and scalar is not None:
        if kind.elem == "i1":
            return lambda *xs: bool(scalar(*xs) & 1)
        bits = kind.bits
        half, mask = 1 << (bits - 1), (1 << bits) - 1
        return lambda *xs: ((scalar(*xs) + half) & mask) - half
    dtype = register_dtype(kind.elem)
    if kind.kind == "scalar":
        return lambda *xs: wrap(int(array(*(dtype(x) for x in xs))), kind.bits)
    if kind.elem == "i1":  # NumPy has no + and - on booleans: they are exclusive or, * is and
        return {"arith.addi": np.logical_xor, "arith.subi": np.logical_xor, "arith.muli": np.logical_and}.get(
            op.name, array
        )
    if isinstance(array, np.ufunc):
        return array
    return lambda *xs: array(*xs).astype(dtype, copy=False)


@plain(*_UNSIGNED)
def _unsigned(op: Op) -> Callable[..., Any]:
    function, kind = _UNSIGNED[op.name], op.type
    dtype = register_dtype(kind.elem)

    def run(*xs: Any) -> Any:
        result = np.asarray(function(*(unsigned(np.asarray(x, dtype)) for x in xs)))
        return as_register(
            result if result.dtype == np.bool_ else result.astype(unsigned(np.zeros(1, dtype)).dtype).view(dtype), kind
        )

    return _undefined_by_zero(op, run)


_COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_SCALAR_COMPARE = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip


@plain("arith.cmpi")
def _cmpi(op: Op) -> Callable[..., Any]:
    predicate = op.text.split()[0].rstrip(",")
    name = predicate if predicate in _COMPARE else predicate[1:]
    kind = op.inputs[0]
    if predicate[0] == "u" and predicate in ("ult", "ule", "ugt", "uge"):
        dtype = register_dtype(kind.elem)
        return lambda a, b: as_register(
            _COMPARE[name](unsigned(np.asarray(a, dtype)), unsigned(np.asarray(b, dtype))), op.type
        )
    return _SCALAR_COMPARE[name] if kind.kind == "scalar" else _COMPARE[name]


@plain("arith.cmpf")
def _cmpf(op: Op) -> Callable[..., Any]:
    predicate = op.text.split()[0].rstrip(",")
    kind = op.type
    if predicate in ("ord", "uno"):
        return lambda a, b: as_register((np.isnan(a) | np.isnan(b)) ^ (predicate == "ord"), kind)
    if predicate in ("true", "false"):
        return lambda a, b: as_register(np.full(np.shape(a), predicate == "true"), kind)
    compare = _COMPARE[predicate[1:]]
    if predicate == "one":
        return lambda a, b: as_register((a != b) & ~np.isnan(a) & ~np.isnan(b), kind)
    if predicate[0] == "o" or predicate == "une":
        return compare if kind.kind != "scalar" else lambda a, b: bool(compare(a, b))
    return lambda a, b: as_register(compare(a, b) | np.isnan(a) | np.isnan(b), kind)


@plain("arith.select")
def _select(op: Op) -> Callable[..., Any]:
    if op.inputs[0].kind != "tensor" and op.type.kind != "tensor":
        return lambda condition, a, b: a if condition else b
    if op.inputs[0].kind == "tensor" and op.inputs[0].shape == ():
        ones = (1,) * len(op.type.shape or ())
        return lambda condition, a, b: np.where(np.reshape(condition, np.shape(condition) + ones), a, b)
    if op.type.elem == "i1" or op.inputs[0].elem == "i1":
        return lambda condition, a, b: np.where(condition, a, b)
    return lambda condition, a, b: a if condition else b


@plain("arith.constant")
def _constant(op: Op) -> Callable[..., Any]:
    kind = op.outputs[0] if op.outputs else parse_type("i1")  # `true` and `false` print no type
    text = op.text.strip()
    found = re.search(r"dense<(.*)>$", text)
    if kind.kind == "tensor" and found:
        body = found[1]
        if body == '""':
            dtype = np.dtype(np.uint8) if kind.elem == "i1" else np.dtype(register_dtype(kind.elem))
            value = np.frombuffer(bytes.fromhex(op.strings[-1].removeprefix("0x")), dtype).reshape(kind.shape or ())
        elif body.startswith("["):
            value = np.array(ast.literal_eval(body.replace("true", "True").replace("false", "False")))
        else:
            value = np.full(kind.shape or (), _number(body, kind), register_dtype(kind.elem))
        result = as_register(np.broadcast_to(value, kind.shape or ()), kind)
    elif kind.kind in ("scalar", "tensor"):
        result = _number(text.split("{")[0].strip() or text, kind)
        result = as_register(result, kind)
    else:
        raise op.error(f"a constant of type {kind} is not understood")
    return lambda: result


def _number(text: str, kind: Type) -> Any:
    """Parse a literal of MLIR: decimal, hexadecimal bits, true or false."""
    if text in ("true", "false"):
        return text == "true"
    if not kind.is_float:
        return int(text, 0)
    if not text.startswith("0x"):
        return float(text)
    bits = int(text, 16)
    if kind.elem == "bf16":
        return struct.unpack("<f", struct.pack("<I", bits << 16))[0]
    if kind.elem not in ("f16", "f32", "f64"):
        from ..ir.formats import decode

        return float(decode(np.array([bits], np.uint8), kind.elem)[0])
    code, size = {"f16": ("<e", "<H"), "f32": ("<f", "<I"), "f64": ("<d", "<Q")}[kind.elem]
    return struct.unpack(code, struct.pack(size, bits))[0]


@plain("arith.extf", "arith.truncf", "tt.fp_to_fp", "arith.sitofp", "arith.extsi", "arith.trunci", "arith.index_cast")
def _convert(op: Op) -> Callable[..., Any]:
    source, kind = op.inputs[0], op.outputs[0]
    narrow = rounder(kind.elem) if op.name in ("arith.truncf", "tt.fp_to_fp", "arith.sitofp") else None
    if narrow is not None and op.name == "tt.fp_to_fp" and "rounding = rtz" in op.text:
        narrow = cut(kind.elem)
    dtype = register_dtype(kind.elem)
    if narrow is not None:
        return lambda x: as_register(narrow(np.asarray(x).astype(dtype, copy=False)), kind)
    if kind.elem == "i1":
        return lambda x: as_register(np.asarray(x) & 1, kind)
    if source.elem == "i1" and op.name != "arith.index_cast":
        return lambda x: as_register(np.where(x, -1, 0), kind)
    if kind.kind == "scalar":
        return lambda x: as_register(x, kind)
    return lambda x: np.asarray(x).astype(dtype, copy=False)


@plain("arith.extui", "arith.uitofp", "arith.index_castui")
def _convert_unsigned(op: Op) -> Callable[..., Any]:
    source, kind = op.inputs[0], op.outputs[0]
    narrow = rounder(kind.elem)
    dtype = register_dtype(source.elem)

    def run(x: Any) -> Any:
        value = unsigned(np.asarray(x, dtype))
        value = value.astype(register_dtype(kind.elem))
        return as_register(value if narrow is None else narrow(value), kind)

    return run


@plain("arith.fptosi", "arith.fptoui")
def _to_integer(op: Op) -> Callable[..., Any]:
    """Round towards zero."""
    kind, signed = op.outputs[0], op.name == "arith.fptosi"
    dtype = register_dtype(kind.elem)
    return lambda x: as_register(as_integers(np.trunc(x), kind.bits, signed=signed).astype(dtype), kind)


@plain("arith.bitcast", "tt.bitcast")
def _bitcast(op: Op) -> Callable[..., Any]:
    source, kind = op.inputs[0], op.outputs[0]
    if source.elem == "ptr" or kind.elem == source.elem:
        return lambda x: x
    return lambda x: bitcast(x, source, kind)


@plain("arith.mulsi_extended", "arith.mului_extended", "tt.mulhiui")
def _wide(op: Op) -> Callable[..., Any]:
    """Return both halves of a product, or the high one."""
    kind = op.outputs[0]
    bits, dtype = kind.bits, register_dtype(kind.elem)
    signed = op.name == "arith.mulsi_extended"
    exact = np.int64 if bits <= 32 else object  # Python's integers where NumPy has none as wide

    def run(a: Any, b: Any) -> Any:
        wide = [(np.asarray(x, dtype) if signed else unsigned(np.asarray(x, dtype))).astype(exact) for x in (a, b)]
        product = np.asarray(wide[0] * wide[1], exact)
        halves = [((part + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)) for part in (product, product >> bits)]
        low, high = (as_register(np.asarray(half).astype(dtype)[()], kind) for half in halves)
        return high if op.name == "tt.mulhiui" else (low, high)

    return run
