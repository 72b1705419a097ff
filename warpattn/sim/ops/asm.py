"""Inline assembly: a handler for every string that is known, an error for any other.

    @elementwise("tanh.approx.f32 $0, $1;")      register arrays in, arrays out
    @whole("bar.sync")                           for a role: may touch barriers, may wait; the string starts with it

Runs of white space in strings count as one blank. A kernel's author can add handlers with the same decorators before
the kernel is simulated.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..ir.formats import as_register, decode, encode, round_bf16
from ..ir.module import Op
from ..machine.pending import opened, poisoned, used
from ..machine.registry import ACTING, blocking, plain
from ..memory.shared import MemDesc
from .barriers import arrive, meet

_ELEMENTWISE: dict[str, Callable[..., Any]] = {}
_OF_PROGRAM: dict[str, Callable[[Any], int]] = {  # strings that read where and when a program runs
    **dict.fromkeys(
        (f"mov.u{bits} $0, %{name};" for bits in (32, 64) for name in ("globaltimer", "clock", "clock64")),
        lambda role: role.run.steps,
    ),
    "s_memrealtime $0 s_waitcnt vmcnt(0)": lambda role: role.run.steps,
    "mov.u32 $0, %smid;": lambda role: role.program.number,
}
_WHOLE: list[tuple[re.Pattern[str], Callable[..., Any]]] = []
_PREFETCHES = (
    "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p cp.async.bulk.prefetch.tensor.4d.L2.global.tile [$1, {$6, $5, $4, $3}]; "
    "mov.b32 $0, 0; }",
)


def elementwise(*strings: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what an elementwise assembly string computes: arrays in, an array or a tuple of arrays out."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        _ELEMENTWISE.update({_squeezed(text): function for text in strings})
        return function

    return add


def whole(pattern: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a generator `run(role, match, *operands)` for strings that a regular expression matches."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        _WHOLE.append((re.compile(pattern), function))
        return function

    return add


def _squeezed(text: str) -> str:
    return " ".join(text.replace("\\0A", " ").replace("\\n", " ").replace("\\09", " ").split())


@plain("tt.elementwise_inline_asm")
def _elementwise(op: Op) -> Callable[..., Any]:
    text = _squeezed(op.strings[0])
    if text in _OF_PROGRAM and not op.inputs:
        op.kind, kind, of_program = ACTING, op.outputs[0], _OF_PROGRAM[text]

        def read(role: Any) -> Any:
            role.run.readings += 1
            return as_register(np.full(kind.shape or (), of_program(role))[()], kind)

        return read
    function, kinds = _ELEMENTWISE.get(text), op.outputs
    if function is None:
        raise op.error(f"no handler for the assembly {text!r}; register one with warpattn.sim.elementwise")
    if text in _PREFETCHES:
        op.kind = ACTING
        return lambda role, *xs: as_register(function(*_defined(role, *xs)), kinds[0])
    if len(kinds) == 1:
        return lambda *xs: as_register(function(*xs), kinds[0])
    return lambda *xs: tuple(as_register(y, kind) for y, kind in zip(function(*xs), kinds, strict=False))


@blocking("ttg.inline_asm", "tt.inline_asm")
def _inline(op: Op) -> Callable[..., Any]:
    text = _squeezed(op.strings[0])
    for pattern, function in _WHOLE:
        found = pattern.match(text)
        if found:
            return lambda role, *xs, run=function, match=found: run(role, match, *xs)
    raise op.error(f"no handler for the assembly {text!r}; register one with warpattn.sim.whole")


def _pair(high: np.ndarray, low: np.ndarray, elem: str) -> np.ndarray:
    bits = encode(high, elem).astype(np.uint32) << 16 | encode(low, elem)
    return bits.view(np.int32)


@elementwise("cvt.rn.bf16x2.f32 $0, $1, $2;")
def _pack_bf16(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    return _pair(round_bf16(high), round_bf16(low), "bf16")


@elementwise("mul.rn.bf16x2 $0, $1, $2;")
def _multiply_bf16(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    xs, ys = ([pair.view(np.uint32) & 0xFFFF0000, pair.view(np.uint32) << 16] for pair in (a, b))
    high, low = (round_bf16(x.view(np.float32) * y.view(np.float32)) for x, y in zip(xs, ys, strict=True))
    return _pair(high, low, "bf16")


@elementwise("cvt.rn.f16x2.f32 $0, $1, $2;")
def _pack_fp16(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    return _pair(high, low, "f16")


@elementwise(
    "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;"
    " mov.b32 $0, {low, high}; }"
)
def _pack_e4m3(*values: np.ndarray) -> np.ndarray:
    bits = [encode(value, "f8E4M3FN").view(np.uint8).astype(np.uint32) << 8 * i for i, value in enumerate(values)]
    return (bits[0] | bits[1] | bits[2] | bits[3]).view(np.int32)


def _unpack_fp8(pairs: np.ndarray, elem: str) -> tuple[np.ndarray, np.ndarray]:
    """Unpack the low and the high byte of each pair to two values."""
    both = np.ascontiguousarray(pairs).view(np.uint16)
    return decode((both & 0xFF).astype(np.uint8), elem), decode((both >> 8).astype(np.uint8), elem)


def _scale_to_bf16(words: np.ndarray, scales: np.ndarray, elem: str) -> tuple[np.ndarray, np.ndarray]:
    """Multiply the four bytes of each word by its scale; two words of pairs of bf16."""
    taken = [(words.view(np.uint32) >> 8 * i & 0xFF).astype(np.uint8) for i in range(4)]
    found = [round_bf16(decode(each, elem) * scales) for each in taken]
    return _pair(found[1], found[0], "bf16"), _pair(found[3], found[2], "bf16")


for _kind, _elem in (("e4m3x2", "f8E4M3FN"), ("e5m2x2", "f8E5M2")):
    elementwise(
        "{ .reg .b32 x; .reg .b16 low, high; prmt.b32 x, $2, 0, 0x3120; mov.b32 {low, high}, x;"
        f" cvt.rn.f16x2.{_kind} $0, low; cvt.rn.f16x2.{_kind} $1, high; }}"
    )(partial(_unpack_fp8, elem=_elem))

    elementwise(
        "{ .reg .b16 low, high, a, b, c, d; .reg .b32 x, y; .reg .f32 p, q, r, s; mov.b32 {low, high}, $2;"
        f" cvt.rn.f16x2.{_kind} x, low; cvt.rn.f16x2.{_kind} y, high; mov.b32 {{a, b}}, x; mov.b32 {{c, d}}, y;"
        " cvt.f32.f16 p, a; cvt.f32.f16 q, b; cvt.f32.f16 r, c; cvt.f32.f16 s, d;"
        " mul.f32 p, p, $3; mul.f32 q, q, $3; mul.f32 r, r, $3; mul.f32 s, s, $3;"
        " cvt.rn.bf16x2.f32 $0, q, p; cvt.rn.bf16x2.f32 $1, s, r; }"
    )(partial(_scale_to_bf16, elem=_elem))


@elementwise("mov.b32 {$0, $1}, $2;")
def _unpack(pair: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    bits = pair.view(np.uint32)
    return (bits & 0xFFFF).astype(np.uint16).view(np.int16), (bits >> 16).astype(np.uint16).view(np.int16)


@elementwise("mov.b32 $0, {$1, $2};")
def _join(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return (high.view(np.uint16).astype(np.uint32) << 16 | low.view(np.uint16)).view(np.int32)


@elementwise("tanh.approx.f32 $0, $1;")
def _tanh(x: np.ndarray) -> np.ndarray:
    return np.tanh(x)


@elementwise("ex2.approx.f32 $0, $1;", "ex2.approx.ftz.f32 $0, $1;")
def _exp2(x: np.ndarray) -> np.ndarray:
    return np.exp2(x)


@elementwise("rcp.approx.f32 $0, $1;", "rcp.approx.ftz.f32 $0, $1;")
def _reciprocal(x: np.ndarray) -> np.ndarray:
    return np.float32(1) / x


@elementwise(*_PREFETCHES)
def _prefetch(tensor: Any, wanted: np.ndarray, *coord: np.ndarray) -> np.ndarray:
    """Do nothing: there is no L2 here."""
    return np.zeros_like(wanted)


def _defined(role: Any, tensor: Any, wanted: Any, *coord: Any) -> tuple[Any, ...]:
    """Return the operands of a prefetch. A finding for each that decides, undefined, what a thread prefetches."""
    asked, missing = opened(wanted)
    faults = [missing] if missing is not None else []
    places = [opened(x) for x in coord]
    faults += [found for _, found in places if found is not None and np.any(found.where & (asked != 0))]
    for fault in faults:
        role.run.findings.add(used(fault, role.place()))
    return tensor, asked, *(place for place, _ in places)


@whole(r"bar(?:rier)?(?:\.cta)?\.(sync|arrive)(?:\.aligned)? (\d+|\$0), (\d+);$")
def _named_barrier(role: Any, match: re.Match[str], *operands: Any) -> Any:
    """Let all threads of the role arrive at a hardware barrier; with `sync` they also wait for other threads. Its
    number is in the text or an operand."""
    number = operands[0] if match[2] == "$0" else match[2]
    yield from meet(role, int(number), int(match[3]), waits=match[1] == "sync")


@whole(
    r"\{ \.reg \.pred e, p; setp\.ne\.b32 p, \$1, 0; elect\.sync _\|e, 0xffffffff; and\.pred e, e, p; "
    r"@e mbarrier\.arrive\.release\.cta\.shared::cta\.b64 _, \[\$0\]; \}$"
)
def _warp_arrive(role: Any, match: re.Match[str], barrier: MemDesc, predicate: int) -> Any:
    """One elected lane of every warp arrives, if the predicate is not zero."""
    yield from role.run.pause()
    if predicate:
        arrive(role, barrier, role.num_warps)


@whole(
    r"\{ \.reg \.pred e, p; setp\.ne\.b32 p, \$1, 0; (tcgen05\.fence::before_thread_sync; )?"
    r"bar\.warp\.sync 0xffffffff; elect\.sync _\|e, 0xffffffff; and\.pred e, e, p; "
    r"@e mbarrier\.arrive\.release\.cta\.shared::cta\.b64 _, \[\$0\]; \}$"
)
def _warp_signal(role: Any, match: re.Match[str], barrier: MemDesc, predicate: int) -> Any:
    """Do the same, ordered after the accesses of all lanes of the warp to shared and, with the fence, tensor memory."""
    if match[1]:
        _signal(role)
    yield from _warp_arrive(role, match, barrier, predicate)


def _signal(role: Any) -> None:
    role.clock.signal(role.lane)
    role.advance()


@whole(r"mov\.u32 \$0, %ctaid\.([xyz]);$")
def _program_id(role: Any, match: re.Match[str]) -> Any:
    """Return the block's place in the launch: along x a cluster counts as many blocks as it has CTAs."""
    axis, count = "xyz".index(match[1]), role.program.cluster.count
    index = role.program.index[axis]
    return index if axis else index * count + role.program.cta
    yield


@whole(r"mov\.u32 \$0, %cluster_ctarank;$")
def _cluster_rank(role: Any, match: re.Match[str]) -> Any:
    """Return the rank of a CTA in its cluster."""
    return role.program.cta
    yield


@whole(r"mov\.u32 \$0, \$1;$")
def _same(role: Any, match: re.Match[str], x: int) -> Any:
    """Return a scalar unchanged."""
    return x
    yield


@whole(r"ld\.shared\.b32 \$0, \[\$1\];$")
def _load_word(role: Any, match: re.Match[str], view: MemDesc) -> Any:
    """Load the first 32 bits of a view, for every thread."""
    bits, missing = view.buffer.read(role.access(view, False), role.clock)
    value = int(np.ascontiguousarray(bits).reshape(-1).view(np.int32)[0])
    return poisoned(value, None if missing is None else missing.at(_first_word(missing.where, bits).any()))
    yield


@whole(r"st\.shared\.b32 \[\$0\], \$1;$")
def _store_word(role: Any, match: re.Match[str], view: MemDesc, value: int) -> Any:
    """Let every thread write the first 32 bits of a view."""
    _write_word(role, view, value)
    return None
    yield


@whole(
    r"\{ \.reg \.b32 at, x; and\.b32 at, \$3, 31; mad\.lo\.u32 at, at, 4, \$1; bar\.warp\.sync 0xffffffff; "
    r"mov\.b32 \$0, \$2; "
    r"(?:ld\.shared\.b32 x, \[at \+ \d+\]; and\.b32 x, x, \d+; add\.u32 x, x, \d+; or\.b32 \$0, \$0, x; )+\}$"
)
def _see_nonfinite(role: Any, match: re.Match[str], tile: MemDesc, seen: int, threads: np.ndarray) -> Any:
    """Return the sign bit if it was set before or a number in the first row of a tile is not finite."""
    bits, missing = tile.buffer.read(role.access(tile, False), role.clock)
    finite = np.isfinite(decode(bits[0], tile.elem)).all()
    value = seen if finite else seen | -(1 << 31)
    return poisoned(value, None if missing is None else missing.at(missing.where[0].any()))
    yield


@whole(
    r"\{ \.reg \.pred p; \.reg \.b32 x; and\.b32 x, \$3, -\d+; setp\.ne\.b32 p, x, 0; "
    r"vote\.sync\.any\.pred p, p, 0xffffffff; "
    r"setp\.ge\.and\.s32 p, \$1, 0, p; setp\.eq\.and\.s32 p, \$4, 0, p; "
    r"@p ld\.shared\.b32 x, \[\$0\]; @p st\.shared\.b32 \[\$0\], \$1; @p st\.shared\.b32 \[\$2\], x; \}$"
)
def _link_if_seen(
    role: Any, match: re.Match[str], head: MemDesc, place: int, out: MemDesc, seen: int, threads: np.ndarray
) -> Any:
    """Let the first thread put a number at the head of a list, if the first warp has seen a non-finite number."""
    if place >= 0 and seen < 0:
        before = yield from _load_word(role, match, head)
        _write_word(role, head, place)
        _write_word(role, out, before)


@whole(
    r"\{ \.reg \.pred p; \.reg \.b32 at, end, zero, seen, m, x<\d+>; mov\.b32 zero, 0; "
    r"mad\.lo\.u32 at, \$1, 16, \$0; add\.u32 end, \$0, \d+; AGAIN: .+ "
    r"lop3\.b32 x0, x0, (\d+), m, 0xD8; .+@p bra AGAIN; \}$"
)
def _replace_nonfinite(role: Any, match: re.Match[str], tile: MemDesc, threads: np.ndarray) -> Any:
    """Give non-finite numbers in a tile a finite magnitude. All of the tile counts as written, whatever it holds, so
    that a race shows with every input."""
    bits, missing = tile.buffer.read(role.access(tile, False), role.clock)
    finite, magnitude = np.isfinite(decode(bits, tile.elem)), int(match[1]) & 0x7FFF
    fault = tile.buffer.fault
    replaced = np.where(finite, bits, (bits.astype(np.uint16) & 0x8000) | magnitude).astype(bits.dtype)
    tile.buffer.write(role.store_apart(tile), role.clock, replaced, missing)
    tile.buffer.fault = fault
    return None
    yield


def _write_word(role: Any, view: MemDesc, value: int) -> None:
    """Write the first 32 bits of a view; other bytes stay written or unwritten."""
    bits, access, fault = np.array(view.array[role.program.cta]), role.access(view, True), view.buffer.fault
    bits.reshape(-1).view(np.int32)[0] = value
    missing = view.buffer.unwritten(access)
    if missing is not None:
        missing = missing.at(missing.where.copy())
        _first_word(missing.where, bits)[...] = False
    view.buffer.write(access._replace(hidden=True), role.clock, bits, missing)
    view.buffer.fault = fault


def _first_word(where: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """Return the flags of the elements in the first 32 bits."""
    return where.reshape(-1)[: max(1, 4 // bits.itemsize)]


@whole(r"fence\.proxy\.async(?:\.global|\.shared::(?:cta|cluster))?;$")
def _proxy_fence(role: Any, match: re.Match[str]) -> Any:
    """Make all that is known visible to the asynchronous proxy, whichever memory the fence is for."""
    role.clock.fence()
    role.advance()
    return None
    yield


@whole(r"tcgen05\.fence::(before|after)_thread_sync;$")
def _tcgen05_fence(role: Any, match: re.Match[str]) -> Any:
    """Order accesses of tensor memory before the next arrival, or after the last wait."""
    if match[1] == "before":
        _signal(role)
    else:
        role.clock.admit()
    return None
    yield


@whole(
    r"\{ \.reg \.pred a, b; setp\.gt(u?)\.f32 a, \$1, \$2; "
    r"(?:vote\.sync\.any\.pred b, a, 0xffffffff|barrier\.cta\.red\.or\.pred b, (\d+), (\d+), a); "
    r"selp\.b32 \$0, 1, 0, b; \}$"
)
def _vote_any_greater_one(role: Any, match: re.Match[str], x: np.ndarray, bound: np.ndarray) -> Any:
    """As `_vote_any_greater`, for one value per thread; `gtu` is also true of a NaN. A vote of all warps meets at a
    hardware barrier, which no other role may use meanwhile."""
    if match[2]:
        yield from meet(role, int(match[2]), int(match[3]), alone=True)
    return int(bool((~(x <= bound) if match[1] else x > bound).any()))


@whole(
    r"\{ \.reg \.pred a, b; setp\.gt\.f32 a, \$1, \$3; setp\.gt\.or\.f32 a, \$2, \$4, a; "
    r"vote\.sync\.any\.pred b, a, 0xffffffff; selp\.b32 \$0, 1, 0, b; \}$"
)
def _vote_any_greater(role: Any, match: re.Match[str], x: np.ndarray, bound: np.ndarray) -> Any:
    """Whether any x exceeds its bound. A role is one unit here, so the vote of a warp becomes the vote of the role."""
    return int(bool((x > bound).any()))
    yield


