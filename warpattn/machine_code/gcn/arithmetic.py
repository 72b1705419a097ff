"""What integer instructions compute, and which bits of their operands a result depends on.

Integer instructions compute LDS addresses from the lane's number, constants and the slot of a ring. Instructions in
this table can be evaluated; all others make their result registers unknown.

A value is an array of 32-bit numbers, (waves, 64) for a vector register and (waves, 1) for a scalar one. *Demand* goes
backwards: `(i << 12) & 0x1000` needs only bit 0 of i, so the address repeats while i counts on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Value = np.ndarray  # uint32
ALL, SIGN = 0xFFFF_FFFF, 0x8000_0000
STEP = 1 << 16  # larger constants may change a counter's sign

_Constants = Sequence[int | None]


@dataclass(frozen=True)
class Arithmetic:
    """`run` computes the result from operands; `demand` maps bits of the result to the bits of operands they need."""

    run: Callable[..., Value]
    demand: Callable[[int, _Constants], Sequence[int]]


def below(bits: int) -> int:
    """All bits up to the highest of `bits`: carries go upwards."""
    return (1 << bits.bit_length()) - 1


def _same(bits: int, constants: _Constants) -> list[int]:
    return [bits] * len(constants)


def _carry(bits: int, constants: _Constants) -> list[int]:
    return [below(bits)] * len(constants)


def _sum(bits: int, constants: _Constants) -> list[int]:
    """Like `_carry`, but assumes that a small step does not change the sign of a counter: i % 2 needs the sign."""
    if bits & SIGN and any(number is not None and number < STEP for number in constants):
        bits = below(bits & ~SIGN) | SIGN
        return [bits] * len(constants)
    return _carry(bits, constants)


def _every(bits: int, constants: _Constants) -> list[int]:
    return [ALL if bits else 0] * len(constants)


def _and(bits: int, constants: _Constants) -> list[int]:
    a, b = constants
    return [bits if b is None else bits & b, bits if a is None else bits & a]


def _or(bits: int, constants: _Constants) -> list[int]:
    a, b = constants
    return [bits if b is None else bits & ~b, bits if a is None else bits & ~a]


def _left(bits: int, constants: _Constants) -> list[int]:
    by = constants[1]
    return [below(bits), 31] if by is None else [bits >> (by & 31), 0]


def _right(bits: int, constants: _Constants) -> list[int]:
    by = constants[1]
    return [ALL, 31] if by is None else [bits << (by & 31) & ALL, 0]


def _right_signed(bits: int, constants: _Constants) -> list[int]:
    by = constants[1]
    if by is None:
        return [ALL, 31]
    shifted = bits << (by & 31)
    return [shifted & ALL | (0x8000_0000 if shifted >> 32 else 0), 0]


def _field(bits: int, constants: _Constants) -> list[int]:
    start, width = constants[1:]
    if start is None or width is None:
        return [ALL, 31, 31]
    return [(bits & (1 << (width & 31)) - 1) << (start & 31) & ALL, 0, 0]


def _scalar_field(bits: int, constants: _Constants) -> list[int]:
    told = constants[1]
    if told is None:
        return [ALL, ALL]
    return [*_field(bits, (None, told & 31, told >> 16 & 127))[:1], 0]


def _chain(first: Arithmetic, second: Arithmetic) -> Arithmetic:
    """second(first(a, b), c), such as v_lshl_add_u32."""

    def demand(bits: int, constants: _Constants) -> list[int]:
        inner, last = second.demand(bits, (None, constants[2]))
        return [*first.demand(inner, constants[:2]), last]

    return Arithmetic(lambda a, b, c: second.run(first.run(a, b), c), demand)


def _turned(operation: Arithmetic) -> Arithmetic:
    """Swap the two operands: v_lshlrev_b32 shifts its second by its first."""
    return Arithmetic(
        lambda a, b: operation.run(b, a), lambda bits, c: list(reversed(operation.demand(bits, (c[1], c[0]))))
    )


def _bits(a: Value, start: Value, width: Value, signed: bool = False) -> Value:
    start, width = start & 31, np.minimum(width & 127, 32).astype(np.uint64)
    mask = ((np.uint64(1) << width) - np.uint64(1)).astype(np.uint32)
    field = (a >> start) & mask
    if signed:
        top = (mask >> np.uint32(1)) + np.uint32(1)
        field = (field ^ top) - top
    return field


def _compare(name: str) -> Callable[[Value, Value], Value]:
    test = {"eq": np.equal, "lg": np.not_equal, "ne": np.not_equal, "gt": np.greater, "ge": np.greater_equal,
            "lt": np.less, "le": np.less_equal}  # fmt: skip
    relation, _, kind = name.partition("_")
    if kind.startswith("i"):
        return lambda a, b: test[relation](a.view(np.int32), b.view(np.int32))
    return test[relation]


COMPARISONS = {f"{r}_{kind}": _compare(f"{r}_{kind}") for r in ("eq", "lg", "ne", "gt", "ge", "lt", "le")
               for kind in ("i32", "u32")}  # fmt: skip
BIT_TESTS = {"s_bitcmp0_b32": 0, "s_bitcmp1_b32": 1}


def _high(a: Value, b: Value) -> Value:
    return (a.astype(np.uint64) * b.astype(np.uint64) >> np.uint64(32)).astype(np.uint32)


def _high_signed(a: Value, b: Value) -> Value:
    wide = a.view(np.int32).astype(np.int64) * b.view(np.int32).astype(np.int64)
    return (wide >> np.int64(32)).astype(np.uint32)


def _reversed(a: Value) -> Value:
    result = np.zeros_like(a)
    for i in range(32):
        result |= ((a >> np.uint32(i)) & np.uint32(1)) << np.uint32(31 - i)
    return result


_ADD = Arithmetic(np.add, _sum)
_SUB = Arithmetic(np.subtract, _carry)
_MUL = Arithmetic(np.multiply, _carry)
_AND = Arithmetic(np.bitwise_and, _and)
_OR = Arithmetic(np.bitwise_or, _or)
_XOR = Arithmetic(np.bitwise_xor, _same)
_AND_NOT = Arithmetic(lambda a, b: a & ~b, _same)
_OR_NOT = Arithmetic(lambda a, b: a | ~b, _same)
_LEFT = Arithmetic(lambda a, b: a << (b & 31), _left)
_RIGHT = Arithmetic(lambda a, b: a >> (b & 31), _right)
_RIGHT_SIGNED = Arithmetic(lambda a, b: (a.view(np.int32) >> (b & 31).view(np.int32)).view(np.uint32), _right_signed)
_MOVE = Arithmetic(lambda a: a, _same)
_NOT = Arithmetic(np.bitwise_not, _same)
_MIN, _MAX = Arithmetic(np.minimum, _every), Arithmetic(np.maximum, _every)
_MIN_SIGNED = Arithmetic(lambda a, b: np.minimum(a.view(np.int32), b.view(np.int32)).view(np.uint32), _every)
_MAX_SIGNED = Arithmetic(lambda a, b: np.maximum(a.view(np.int32), b.view(np.int32)).view(np.uint32), _every)
_MUL_24 = Arithmetic(lambda a, b: (a & 0xFF_FFFF) * (b & 0xFF_FFFF), _carry)

TABLE: dict[str, Arithmetic] = {
    "s_mov_b32": _MOVE, "s_movk_i32": _MOVE, "v_mov_b32": _MOVE, "s_not_b32": _NOT, "v_not_b32": _NOT,
    **dict.fromkeys(("v_accvgpr_write_b32", "v_accvgpr_read_b32", "v_accvgpr_mov_b32"), _MOVE),
    "v_bfrev_b32": Arithmetic(_reversed, _every), "s_brev_b32": Arithmetic(_reversed, _every),
    "s_add_i32": _ADD, "s_add_u32": _ADD, "v_add_u32": _ADD, "s_addk_i32": _ADD, "v_add_co_u32": _ADD,
    "s_sub_i32": _SUB, "s_sub_u32": _SUB, "v_sub_u32": _SUB, "v_subrev_u32": _turned(_SUB),
    "s_mul_i32": _MUL, "v_mul_lo_u32": _MUL, "s_mulk_i32": _MUL, "v_mul_u32_u24": _MUL_24, "v_mul_i32_i24": _MUL_24,
    "s_mul_hi_u32": Arithmetic(_high, _every), "v_mul_hi_u32": Arithmetic(_high, _every),
    "s_mul_hi_i32": Arithmetic(_high_signed, _every),
    "s_and_b32": _AND, "v_and_b32": _AND, "s_or_b32": _OR, "v_or_b32": _OR, "s_xor_b32": _XOR, "v_xor_b32": _XOR,
    "s_andn2_b32": _AND_NOT, "s_orn2_b32": _OR_NOT,
    "s_lshl_b32": _LEFT, "v_lshlrev_b32": _turned(_LEFT), "s_lshr_b32": _RIGHT, "v_lshrrev_b32": _turned(_RIGHT),
    "s_ashr_i32": _RIGHT_SIGNED, "v_ashrrev_i32": _turned(_RIGHT_SIGNED),
    "s_bfe_u32": Arithmetic(lambda a, b: _bits(a, b & 31, b >> 16), _scalar_field),
    "s_bfe_i32": Arithmetic(lambda a, b: _bits(a, b & 31, b >> 16, True), _every),
    "v_bfe_u32": Arithmetic(lambda a, b, c: _bits(a, b, c & 31), _field),
    "v_bfe_i32": Arithmetic(lambda a, b, c: _bits(a, b, c & 31, True), _every),
    "v_bfi_b32": Arithmetic(lambda a, b, c: (a & b) | (~a & c), _same),
    "s_min_i32": _MIN_SIGNED, "s_max_i32": _MAX_SIGNED, "s_min_u32": _MIN, "s_max_u32": _MAX,
    "v_min_i32": _MIN_SIGNED, "v_max_i32": _MAX_SIGNED, "v_min_u32": _MIN, "v_max_u32": _MAX,
    **{f"s_lshl{n}_add_u32": Arithmetic(lambda a, b, n=n: (a << np.uint32(n)) + b,
                                        lambda bits, c, n=n: [below(bits) >> n, below(bits)]) for n in (1, 2, 3, 4)},
    "v_and_or_b32": _chain(_AND, _OR), "v_lshl_or_b32": _chain(_LEFT, _OR), "v_lshl_add_u32": _chain(_LEFT, _ADD),
    "v_add_lshl_u32": _chain(_ADD, _LEFT), "v_or3_b32": _chain(_OR, _OR), "v_add3_u32": _chain(_ADD, _ADD),
    "v_xad_u32": _chain(_XOR, _ADD), "v_mad_u32_u24": _chain(_MUL_24, _ADD),
}  # fmt: skip
# The same on both halves of a pair of registers.
WIDE = {f"{name.rpartition('_')[0]}_b64": name for name in TABLE if name.startswith("s_") and TABLE[name] in (
    _MOVE, _NOT, _AND, _OR, _XOR, _AND_NOT, _OR_NOT) and name.endswith("b32")} | {"v_mov_b64": "v_mov_b32"}  # fmt: skip


def bit_operation(table: int) -> Arithmetic:
    """v_bitop3_b32 (CDNA 4): a function of three bits by its table; bit 4a+2b+c of it is the result."""

    def run(a: Value, b: Value, c: Value) -> Value:
        result = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), np.uint32)
        for i in range(8):
            if table >> i & 1:
                result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        return result

    return Arithmetic(run, _same)
