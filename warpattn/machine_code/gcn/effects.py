"""The effect of an instruction on registers: which it writes and reads, their values, and the demand on its reads.

Execution masks are not tracked. EXEC is either full or unknown; while it is unknown, a register that changes becomes
unknown, and unwritten lanes of a vector register may hold anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .arithmetic import ALL, BIT_TESTS, COMPARISONS, TABLE, WIDE, Arithmetic, Value, bit_operation
from .text import LANES, Instruction, literal, registers

Known = Value | None
_EXEC = ("exec_lo", "exec_hi")
# Instructions whose first operand is not a result.
_NO_RESULT = ("s_cbranch", "s_branch", "s_waitcnt", "s_barrier", "s_nop", "s_endpgm", "s_setprio", "s_sleep", "s_cmp",
              "s_bitcmp", "buffer_store", "global_store", "flat_store", "scratch_store", "ds_write", "s_setreg",
              "s_sethalt", "s_sendmsg", "s_dcache", "s_icache", "buffer_wb", "buffer_inv", "s_trap", "s_inst",
              "v_nop", "s_setvskip", "s_set_gpr", "s_ttracedata", "global_atomic", "buffer_atomic", "ds_add",
              "s_setpc", "v_cmpx", "s_code_end", "ds_nop", "s_waitcnt_depctr", "s_incperflevel")  # fmt: skip
_TWO_RESULTS = ("v_add_co", "v_sub_co", "v_subrev_co", "v_addc_co", "v_subb_co", "v_subbrev_co", "v_div_scale",
                "v_mad_u64_u32", "v_mad_i64_i32")  # fmt: skip
_KEEPS_CONDITION = ("s_load", "s_buffer_load", "s_mov", "s_mul", "s_get", "s_memtime", "s_pack", "s_cmov")
_SWAPS = ("v_swap_b32", "v_permlane16_swap", "v_permlane32_swap")


@dataclass(frozen=True)
class Effect:
    """Registers written and read; `run` maps known values to known values, `demand` bits of results to bits of reads.

    uniform: an unknown result is the same for all waves (it is read from arguments or scalar memory).
    """

    writes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    run: Callable[[Sequence[Known]], Sequence[Known]] | None = None
    demand: Callable[[Sequence[int]], Sequence[int]] | None = None
    uniform: bool = False


NOTHING = Effect()


def effect(instruction: Instruction) -> Effect:
    """Return the effect of an instruction; one that is not modelled makes its results unknown."""
    name, operands = instruction.name, instruction.operands
    if instruction.to_lds or not operands:
        return NOTHING
    if "exec" in operands or "saveexec" in name or name.startswith("v_cmpx"):
        return _execution(name, operands)
    if name.startswith(("s_cmp_", "s_cmpk_", "s_bitcmp")):
        return _scalar_test(name, operands)
    if name.startswith(_NO_RESULT) and not _returns(instruction):
        return NOTHING
    if name == "v_bitop3_b32":
        return _computed(bit_operation(instruction.number("bitop3")), operands)
    if instruction.modifiers or instruction.encoding in ("sdwa", "dpp", "e64_dpp"):
        return _unknown(operands[:1], name)
    if name.startswith(_SWAPS):
        return _unknown(operands[:2], name)
    return _understood(name, operands) or _unknown(operands[: 1 + name.startswith(_TWO_RESULTS)], name)


def _returns(atomic: Instruction) -> bool:
    """Whether an atomic operation returns the old value in its first operand."""
    flags = atomic.modifiers.split()
    return "_rtn_" in atomic.name or ("_atomic_" in atomic.name and ("sc0" in flags or "glc" in flags))


def _understood(name: str, operands: tuple[str, ...]) -> Effect | None:
    if name in WIDE:
        halves = [_halves(x) for x in operands]
        parts = [_computed(TABLE[WIDE[name]], tuple(x[i] for x in halves)) for i in range(2)]
        return _with_condition(_both(*parts), name)
    if name == "v_cndmask_b32":
        return _select(operands[0], operands[2], operands[1], registers(operands[3] if len(operands) > 3 else "vcc"))
    if name == "s_cselect_b32":
        return _select(operands[0], operands[1], operands[2], ("scc",))
    if name == "s_cselect_b64":
        result, yes, no = (_halves(x) for x in operands)
        return _both(*(_select(result[i], yes[i], no[i], ("scc",)) for i in range(2)))
    if name.startswith("v_cmp_"):
        return _vector_test(name.removeprefix("v_cmp_"), operands)
    if name in ("v_readfirstlane_b32", "v_readlane_b32"):
        return _from_lane(operands)
    if name == "v_lshrrev_b64":
        return _right_wide(operands)
    if name == "v_writelane_b32":
        return _to_lane(operands)
    if name in ("s_movk_i32", "s_addk_i32", "s_mulk_i32"):
        number = str((int(operands[1], 0) & 0xFFFF ^ 0x8000) - 0x8000)
        operands = (operands[0], *operands[: name != "s_movk_i32"], number)
    if name == "v_add_co_u32":
        made = _computed(TABLE[name], (operands[0], *operands[2:]))
        return _both(made, _unknown(operands[1:2], name))
    if name in TABLE and all(len(registers(x)) == 1 or literal(x) is not None for x in operands):
        return _with_condition(_computed(TABLE[name], operands), name)
    return None


def _unknown(operands: Sequence[str], name: str) -> Effect:
    uniform = name[0] == "s"  # scalar: from arguments, scalar memory or other scalars
    written = tuple(register for operand in operands for register in registers(operand))
    if uniform and not name.startswith(_KEEPS_CONDITION):
        written += ("scc",)
    return Effect(written, (), None, None, uniform)


def _halves(operand: str) -> tuple[str, str]:
    found = registers(operand)
    if len(found) == 2:
        return found[0], found[1]
    number = literal(operand)
    return operand, "-1" if number is not None and number >> 31 else "0"


def _computed(arithmetic: Arithmetic, operands: tuple[str, ...]) -> Effect:
    constants = [literal(x) for x in operands[1:]]

    def run(values: Sequence[Any]) -> Sequence[Known]:
        return [None if any(x is None for x in values) else arithmetic.run(*values)]

    return Effect(operands[:1], operands[1:], run, lambda bits: arithmetic.demand(bits[0], constants))


def _both(a: Effect, b: Effect) -> Effect:
    n, m = len(a.writes), len(a.reads)

    def run(values: Sequence[Any]) -> Sequence[Known]:
        return [*_run(a, values[:m]), *_run(b, values[m:])]

    def demand(bits: Sequence[int]) -> Sequence[int]:
        return [*_demand(a, bits[:n]), *_demand(b, bits[n:])]

    return Effect((*a.writes, *b.writes), (*a.reads, *b.reads), run, demand, a.uniform and b.uniform)


def _run(part: Effect, values: Sequence[Any]) -> Sequence[Known]:
    return [None] * len(part.writes) if part.run is None else part.run(values)


def _demand(part: Effect, bits: Sequence[int]) -> Sequence[int]:
    return [0] * len(part.reads) if part.demand is None else part.demand(bits)


_NONZERO = ("s_and_", "s_or_", "s_xor_", "s_andn2_", "s_orn2_", "s_lshl_", "s_lshr_", "s_ashr_", "s_bfe_", "s_not_")


def _with_condition(made: Effect, name: str) -> Effect:
    """Add SCC: scalar logic sets it if the result is not zero; other instructions write something else there."""
    if name[0] != "s":
        return made
    made = replace(made, uniform=True)
    if name.startswith(("s_mov", "s_mul_")):
        return made
    sets = name.startswith(_NONZERO)

    def run(values: Sequence[Any]) -> Sequence[Known]:
        results = _run(made, values)
        known = [x for x in results if x is not None]
        if not sets or len(known) < len(results):
            return [*results, None]
        return [*results, np.any([x != 0 for x in known], axis=0).astype(np.uint32)]

    def demand(bits: Sequence[int]) -> Sequence[int]:
        whole = ALL if sets and bits[-1] else 0
        return _demand(made, [b | whole for b in bits[:-1]])

    return Effect((*made.writes, "scc"), made.reads, run, demand, True)


def _scalar_test(name: str, operands: tuple[str, ...]) -> Effect:
    wanted = BIT_TESTS.get(name)
    relation = COMPARISONS.get(name.removeprefix("s_cmp_").removeprefix("s_cmpk_"))

    def run(values: Sequence[Any]) -> Sequence[Known]:
        a, b = values
        if a is None or b is None or (relation is None and wanted is None):
            return [None]
        found = relation(a, b) if relation is not None else (a >> (b & 31)) & 1 == wanted
        return [np.asarray(found).astype(np.uint32)]

    return Effect(("scc",), operands, run, lambda bits: [ALL if bits[0] else 0] * 2, True)


def _vector_test(name: str, operands: tuple[str, ...]) -> Effect:
    relation = COMPARISONS.get(name.replace("ne_", "lg_"))

    def run(values: Sequence[Any]) -> Sequence[Known]:
        a, b = values
        if relation is None or a is None or b is None:
            return [None, None]
        lanes = np.broadcast_to(relation(a, b), (max(len(a), len(b)), LANES))
        words = np.packbits(lanes, axis=1, bitorder="little").view(np.uint32)
        return [words[:, :1].copy(), words[:, 1:].copy()]

    return Effect(registers(operands[0]), operands[1:3], run, lambda bits: [ALL if any(bits) else 0] * 2)


def _select(result: str, yes: str, no: str, condition: tuple[str, ...]) -> Effect:
    """result = yes where the condition's bit is set, else no. SCC is a whole number, VCC a bit a lane."""

    def run(values: Sequence[Any]) -> Sequence[Known]:
        if any(x is None for x in values):
            a, b = values[:2]
            same = a is not None and b is not None and bool((a == b).all())
            return [a if same else None]
        a, b, *words = values
        if len(words) == 1:
            return [np.where(words[0] != 0, a, b)]
        lanes = np.unpackbits(np.hstack(words).astype("<u4").view(np.uint8), axis=1, bitorder="little")
        return [np.where(lanes != 0, a, b)]

    def demand(bits: Sequence[int]) -> Sequence[int]:
        return [bits[0], bits[0], *[ALL if bits[0] else 0] * len(condition)]

    return Effect((result,), (yes, no, *condition), run, demand, condition == ("scc",))


def _from_lane(operands: tuple[str, ...]) -> Effect:
    lane = literal(operands[2]) if len(operands) > 2 else 0

    def run(values: Sequence[Any]) -> Sequence[Known]:
        x = values[0]
        return [None if x is None or lane is None else np.broadcast_to(x, (len(x), LANES))[:, lane : lane + 1].copy()]

    return Effect(operands[:1], operands[1:2], run, lambda bits: [bits[0]])


def _to_lane(operands: tuple[str, ...]) -> Effect:
    lane = literal(operands[2])

    def run(values: Sequence[Any]) -> Sequence[Known]:
        new, old = values
        if new is None or lane is None:
            return [None]
        x = np.zeros((len(new), LANES), np.uint32) if old is None else np.broadcast_to(old, (len(old), LANES)).copy()
        x[:, lane] = np.broadcast_to(new, (len(x), 1))[:, 0]
        return [x]

    return Effect(operands[:1], (operands[1], operands[0]), run, lambda bits: [bits[0]] * 2)


def _right_wide(operands: tuple[str, ...]) -> Effect:
    """Shift a pair of registers right; of EXEC it tests whether each lane is active."""
    reads = (operands[1], *_halves(operands[2]))

    def run(values: Sequence[Any]) -> Sequence[Known]:
        if any(x is None for x in values):
            return [None, None]
        by, low, high = (x.astype(np.uint64) for x in values)
        whole = (high << np.uint64(32) | low) >> (by & np.uint64(63))
        return [whole.astype(np.uint32), (whole >> np.uint64(32)).astype(np.uint32)]

    return Effect(registers(operands[0]), reads, run, lambda bits: [ALL if any(bits) else 0] * 3)


def _unchanged(values: Sequence[Any]) -> Sequence[Any]:
    return values


def _execution(name: str, operands: tuple[str, ...]) -> Effect:
    """Model writes of EXEC: saved, restored, or unknown."""
    if "saveexec" in name:
        keeps = Effect(registers(operands[0]), _EXEC, _unchanged, _unchanged)
        return _both(keeps, Effect((*_EXEC, "scc")))
    if operands[0] != "exec":
        return _understood(name, operands) or _unknown(operands[:1], name)
    if name == "s_mov_b64":
        return _understood(name, operands) or Effect(_EXEC)
    if name == "s_or_b64":

        def run(values: Sequence[Any]) -> Sequence[Known]:
            full = [i for i in (0, 1) if all(x is not None and (x == ALL).all() for x in values[2 * i : 2 * i + 2])]
            return [*(values[2 * full[0] : 2 * full[0] + 2] if full else (None, None)), None]

        reads = tuple(register for operand in operands[1:] for register in registers(operand))
        return Effect((*_EXEC, "scc"), reads, run, lambda bits: [bits[0] | bits[1]] * len(reads))
    return Effect((*_EXEC, "scc"))
