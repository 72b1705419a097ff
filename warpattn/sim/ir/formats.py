"""Number formats: how registers and memory hold each element type, and how values are rounded to it.

Registers hold floats narrower than 64 bits as float32, with values of the narrow format, integers as NumPy integers
of their width, i1 as bool, pointers as int64 addresses. Memory holds the bits: bf16 and fp16 as uint16, fp8 as uint8.
Scalars are Python ints and bools, and NumPy float scalars.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from .valuetypes import Type

Array = Any  # a NumPy array, or a scalar of a register

_INTS = {"i1": np.bool_, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64, "index": np.int64}
_BITS: dict[int, Any] = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
# fp8 formats: exponent bits, mantissa bits, bias, whether there are infinities, whether -0 is NaN
_FP8 = {
    "f8E5M2": (5, 2, 15, True, False),
    "f8E4M3FN": (4, 3, 7, False, False),
    "f8E5M2FNUZ": (5, 2, 16, False, True),
    "f8E4M3FNUZ": (4, 3, 8, False, True),
}


def register_dtype(elem: str) -> Any:
    """Return the NumPy dtype of an element type in registers."""
    if elem in _INTS:
        return _INTS[elem]
    if elem == "ptr":
        return np.int64
    return np.float64 if elem == "f64" else np.float32


def memory_dtype(elem: str) -> Any:
    """Return the NumPy dtype of an element type in memory; small floats are bits."""
    if elem == "i1":
        return np.uint8
    if elem in _INTS or elem == "ptr" or elem in ("f32", "f64"):
        return register_dtype(elem)
    return _BITS[32 if elem == "tf32" else int(elem.lstrip("bf")[:2].rstrip("E") or 8)]


def round_bf16(x: Array) -> Array:
    """Round float32 to the nearest bf16, ties to even."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + 0x7FFF)) & 0xFFFF0000).view(np.float32)
    nan = np.isnan(x)
    return np.where(nan, np.float32(np.nan), rounded) if nan.any() else rounded


def _round_fp16(x: Array) -> Array:
    return np.asarray(x, np.float32).astype(np.float16).astype(np.float32)


@cache
def _fp8_values(elem: str) -> np.ndarray:
    exponent_bits, mantissa_bits, bias, infinities, negative_zero_nan = _FP8[elem]
    code = np.arange(256)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = code & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    value = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    top = (1 << exponent_bits) - 1
    if infinities:
        value = np.where(exponent == top, np.where(mantissa == 0, np.inf, np.nan), value)
    elif not negative_zero_nan:
        value = np.where((exponent == top) & (mantissa == (1 << mantissa_bits) - 1), np.nan, value)
    value = np.where(code >= 128, -value, value)
    if negative_zero_nan:
        value[128] = np.nan
    return value.astype(np.float32)


@cache
def _fp8_positive(elem: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the finite values from 0 up, and the midpoints between neighbours."""
    values = _fp8_values(elem)[:128]
    finite = values[np.isfinite(values)].astype(np.float64)
    return finite, (finite[1:] + finite[:-1]) / 2


def _encode_fp8(x: Array, elem: str) -> np.ndarray:
    """Round float32 values to fp8 bits, ties to even; too large ones become the largest finite value."""
    x = np.asarray(x, np.float32)
    finite, middle = _fp8_positive(elem)
    magnitude = np.abs(x).astype(np.float64)
    low = np.searchsorted(middle, magnitude, side="left")
    high = np.searchsorted(middle, magnitude, side="right")
    code = np.where(low & 1, high, low)  # on a tie low and high differ by one: take the even one
    code = np.minimum(code, len(finite) - 1)
    negative_zero_nan = _FP8[elem][4]
    sign = np.signbit(x) & ~((code == 0) & negative_zero_nan)
    code = code + 128 * sign
    nan_code = int(np.flatnonzero(np.isnan(_fp8_values(elem)))[0])
    return np.where(np.isnan(x), nan_code, code).astype(np.uint8)


def rounder(elem: str) -> Callable[[Array], Array] | None:
    """Return the function that rounds float32 results to a float type; None if there is nothing to do."""
    if elem == "bf16":
        return round_bf16
    if elem == "f16":
        return _round_fp16
    if elem in _FP8:
        return lambda x: _fp8_values(elem)[_encode_fp8(x, elem)]
    return None


def cut(elem: str) -> Callable[[Array], Array]:
    """Return the function that rounds float32 results to a float type towards zero."""
    nearest = rounder(elem)
    assert nearest is not None

    def toward_zero(x: Array) -> Array:
        value = np.asarray(nearest(x), np.float32)
        before = decode(encode(np.atleast_1d(value), elem) - 1, elem).reshape(value.shape)  # bits of a sign and a size
        return np.where(np.abs(value) > np.abs(x), before, value)

    return toward_zero


def decode(bits: np.ndarray, elem: str) -> np.ndarray:
    """Convert memory bits to register values; always a copy."""
    if elem == "bf16":
        return np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)
    if elem == "f16":
        return np.ascontiguousarray(bits).view(np.float16).astype(np.float32)
    if elem in _FP8:
        return _fp8_values(elem)[bits]
    if elem == "i1":
        return bits != 0
    if elem == "tf32":
        return np.ascontiguousarray(bits).view(np.float32).copy()
    return bits.copy()


def encode(values: Array, elem: str) -> np.ndarray:
    """Convert register values to memory bits."""
    if elem == "bf16":
        return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if elem == "f16":
        return np.asarray(values, np.float32).astype(np.float16).view(np.uint16)
    if elem in _FP8:
        return _encode_fp8(values, elem)
    if elem == "tf32":
        return np.asarray(values, np.float32).view(np.uint32)
    return np.asarray(values).astype(memory_dtype(elem), copy=False)


def bitcast(values: Array, source: Type, result: Type) -> Array:
    """Reinterpret bits as another type of the same width."""
    if source.bits != result.bits:
        raise ValueError(f"a bitcast from {source} to {result} changes the number of bits")
    bits = np.atleast_1d(np.ascontiguousarray(encode(values, source.elem)))
    shaped = bits.view(memory_dtype(result.elem)).reshape(np.shape(values))
    return as_register(decode(shaped, result.elem), result)


def as_integers(x: Array, bits: int, *, signed: bool) -> Array:
    """Convert whole floats to integers: a NaN is 0, what is too small or too large the last integer (cvt of PTX)."""
    info = np.iinfo(f"{'i' if signed else 'u'}{bits // 8}")
    x = np.nan_to_num(np.asarray(x, np.float64), nan=0.0)
    inside = (x >= float(info.min)) & (x < float(info.max + 1))
    last = np.where(x < 0, info.dtype.type(info.min), info.dtype.type(info.max))
    return np.where(inside, np.where(inside, x, 0).astype(info.dtype), last)


def as_register(value: Array, kind: Type) -> Array:
    """Convert a computed value to register form: arrays with their dtype, scalars as Python ints or floats."""
    dtype = register_dtype(kind.elem)
    if kind.kind != "scalar":
        return np.asarray(value).astype(dtype, copy=False)
    if kind.is_float:
        return dtype(value)
    if kind.elem == "i1":
        return bool(value)
    return wrap(int(value), kind.bits)


def wrap(value: int, bits: int) -> int:
    """Wrap an integer to a signed one of `bits` bits."""
    half = 1 << (bits - 1)
    return ((value + half) & (2 * half - 1)) - half


def unsigned(x: Array) -> Array:
    """View bits as an unsigned integer array."""
    x = np.asarray(x)
    return x if x.dtype == np.bool_ else x.view(_BITS[8 * x.dtype.itemsize])
