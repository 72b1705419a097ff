"""Atomic operations, and how a TMA reduction combines an element in memory with one that arrives.

The lanes of an atomic operation run one after the other, each ordered after what the role knows and after what its own
address has released; the role learns and releases for all lanes once they are done.

The compiler checks the types of reductions. Only descriptors know the sign of their integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from ..ir.formats import as_register, decode, encode, memory_dtype, register_dtype, rounder, unsigned, wrap
from ..ir.module import Op
from ..ir.valuetypes import Type
from ..machine.registry import blocking
from ..machine.sync import Wait
from ..memory.global_memory import EPOCH, GlobalBuffer, Part, Release, Toucher
from .memory import bits_at, cells_of, lanes_of, pointee

_ATOMIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b, "fadd": lambda a, b: a + b, "max": max, "min": min, "and": lambda a, b: a & b,
    "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "exch": lambda a, b: b,
}  # fmt: skip


def _updated(name: str, old: Any, new: Any, kind: Type) -> Any:
    if name in ("umax", "umin"):
        bits = kind.bits
        pair = [int(unsigned(np.asarray(x, register_dtype(kind.elem)))[()]) for x in (old, new)]
        return wrap(max(pair) if name == "umax" else min(pair), bits)
    value = _ATOMIC[name](old, new)
    if not kind.is_float:
        return wrap(value, kind.bits)
    narrow = rounder(kind.elem)
    return value if narrow is None else narrow(np.float32(value))


class Semantics(NamedTuple):
    """What an atomic operation orders, and for whom."""

    order: str
    scope: str

    @property
    def acquires(self) -> bool:
        return self.order in ("acq_rel", "acquire")

    @property
    def releases(self) -> bool:
        return self.order in ("acq_rel", "release")

    def toucher(self, role: Any) -> Toucher:
        """Describe a role that accesses memory in this way."""
        return role.toucher()._replace(narrow=self.scope == "cta")


def _words(op: Op) -> list[str]:
    return op.text.replace(",", " ").split()


@blocking("tt.atomic_rmw")
def _atomic_rmw(op: Op) -> Callable[..., Any]:
    name, *semantics = _words(op)[:3]
    order = Semantics(*semantics)
    kind = pointee(op.inputs[0])
    if name not in _ATOMIC and name not in ("umax", "umin"):
        raise op.error(f"atomic {name} is not simulated")

    def run(role: Any, pointers: Any, values: Any, mask: Any = None) -> Any:
        yield None  # another role may update it first
        given = _listed(values, pointers, kind)
        how = "sum" if name == "fadd" else "atomic"
        return _atomic(role, kind, order, pointers, mask, lambda old, i: _updated(name, old, given[i], kind), how)

    return run


@blocking("tt.atomic_cas")
def _atomic_cas(op: Op) -> Callable[..., Any]:
    order, kind = Semantics(*_words(op)[:2]), pointee(op.inputs[0])

    def run(role: Any, pointers: Any, expected: Any, values: Any) -> Any:
        yield None
        wanted, given = _listed(expected, pointers, kind), _listed(values, pointers, kind)
        return _atomic(role, kind, order, pointers, None, lambda old, i: given[i] if old == wanted[i] else old)

    return run


@blocking("tt.atomic_load")
def _atomic_load(op: Op) -> Callable[..., Any]:
    order, kind = Semantics(*_words(op)[:2]), pointee(op.inputs[0])

    def run(role: Any, pointers: Any, mask: Any = None) -> Any:
        yield None
        return _atomic(role, kind, order, pointers, mask, None, "poll")

    return run


@blocking("tt.atomic_store")
def _atomic_store(op: Op) -> Callable[..., Any]:
    order, kind = Semantics(*_words(op)[:2]), pointee(op.inputs[0])

    def run(role: Any, pointers: Any, values: Any, mask: Any = None) -> Any:
        yield None
        given = _listed(values, pointers, kind)
        _atomic(role, kind, order, pointers, mask, lambda old, i: given[i], "store")

    return run


def _listed(values: Any, pointers: Any, kind: Type) -> list:
    """List a value for each pointer: floats as NumPy scalars, integers as Python ints."""
    wide = np.asarray(values, register_dtype(kind.elem))
    if wide.shape != np.shape(pointers):
        wide = np.broadcast_to(wide, np.shape(pointers))
    return list(wide.reshape(-1)) if kind.is_float else wide.reshape(-1).tolist()


def _atomic(
    role: Any,
    kind: Type,
    order: Semantics,
    pointers: Any,
    mask: Any,
    update: Callable[[Any, int], Any] | None,
    how: str = "atomic",
) -> Any:
    """Update one element after the other; return the old values. Without an update it only reads ("poll"); an acquire
    that reads a "store" does not get what was released there before; a "sum" rounds."""
    addresses, wanted = lanes_of(pointers, mask)
    flat = addresses.reshape(-1).tolist()
    spots = range(len(flat)) if wanted is None else np.flatnonzero(wanted).tolist()
    old = np.zeros(len(flat), register_dtype(kind.elem))
    memory, dtype, size, floats = role.run.memory, memory_dtype(kind.elem), kind.itemsize, kind.is_float
    who = order.toucher(role)
    learned: dict[int, Release] = {}
    reached: dict[tuple[int, int], GlobalBuffer] = {}
    for i in spots:
        found = memory.resolve_one(flat[i], size, who, "updates")
        if found is None:
            continue
        buffer, at = found
        release = _heard(buffer, at, who) if order.acquires else None
        if release is not None:
            learned[id(release)] = release
        cells = range(at // buffer.granule, -(-(at + size) // buffer.granule))
        memory.update(buffer, cells, who, release, "atomic" if how == "store" else how)
        reached[buffer.base, at] = buffer
        if how == "store":
            buffer.released.pop(at, None)
        bits = buffer.bytes[at : at + size].view(dtype)
        value = decode(bits, kind.elem)[0] if floats else int(bits[0])
        old[i] = value
        if update is None:
            continue
        new, before = update(value, i), bits.tobytes()
        bits[0] = encode(np.asarray([new], register_dtype(kind.elem)), kind.elem)[0] if floats else new
        role.run.changes += bits.tobytes() != before
    _acquire(role, learned.values())
    if order.releases:
        _release(role, who, reached, alone=not order.acquires)
    return as_register(old.reshape(addresses.shape)[()], kind)


def _heard(buffer: GlobalBuffer, at: int, who: Toucher) -> Release | None:
    """Return what an access that acquires learns at byte `at`."""
    release = buffer.released.get(at)
    return release if release is not None and release.heard(who) else None


def _acquire(role: Any, releases: Iterable[Release]) -> None:
    """Let a role learn what was released, the newest first, since that mostly includes the others."""
    for release in sorted(releases, key=lambda release: -release.packed):
        if release.packed < 0 or not role.clock.knows(release.packed >> 32, release.packed & EPOCH):
            role.clock.join(release.clock)


def _release(role: Any, who: Toucher, reached: dict[tuple[int, int], GlobalBuffer], alone: bool) -> None:
    """Let addresses release what a role knows; `alone`: also what they released before, which it has not acquired."""
    mine = Release(role.lane << 32 | role.clock.epoch(role.lane), role.clock.copy(), who.cta, who.narrow)
    for (_, at), buffer in reached.items():
        before = _heard(buffer, at, who) if alone else None
        if before is None:
            buffer.released[at] = mine
        else:
            both = mine.clock.copy()
            both.join(before.clock)
            buffer.released[at] = Release(-1, both, who.cta, who.narrow)
    role.advance()


class PollWait(Wait):
    """Elements of a tensor that must hold the expected values."""

    def __init__(self, part: Part, kind: Type, wanted: np.ndarray) -> None:
        self.part, self.kind, self.wanted = part, kind, wanted

    def found(self) -> np.ndarray:
        """Return the elements' values."""
        bits = bits_at(self.part.buffer, self.part.offsets, memory_dtype(self.kind.elem), self.kind.itemsize)
        return decode(bits, self.kind.elem)

    def ready(self) -> bool:
        return not (self.found() != self.wanted).any()

    def describe(self) -> str:
        at = int(np.flatnonzero(self.found() != self.wanted)[0]) if not self.ready() else 0
        holds, wanted = self.found()[at], self.wanted[at]
        return f"{wanted} at byte {self.part.offsets[at]} of {self.part.buffer.name}, which holds {holds}"


@blocking("tt.atomic_poll")
def _atomic_poll(op: Op) -> Callable[..., Any]:
    """Wait until every address holds the expected value."""
    order, kind, result = Semantics(*_words(op)[:2]), pointee(op.inputs[0]), op.outputs[0]
    if len(op.operands) > 2:
        raise op.error("a poll with a time limit is not simulated")

    def run(role: Any, pointers: Any, expected: Any) -> Any:
        addresses, _ = lanes_of(pointers, None)
        memory, values = role.run.memory, np.broadcast_to(np.asarray(expected), addresses.shape).reshape(-1)
        for part in memory.resolve(addresses.reshape(-1), kind.itemsize, role.toucher(), "polls"):
            wait = PollWait(part, kind, values if part.chosen is None else values[part.chosen])
            yield None
            while not wait.ready():
                yield wait
            who = order.toucher(role)
            if order.acquires:
                found = (_heard(part.buffer, at, who) for at in part.offsets.tolist())
                _acquire(role, {id(release): release for release in found if release is not None}.values())
            memory.touch(part.buffer, cells_of(part.buffer, part.offsets, kind.itemsize), who, "poll")
        return as_register(np.ones(addresses.shape, np.bool_)[()], result)

    return run


Update = Callable[[np.ndarray, np.ndarray], np.ndarray]

_FUNCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add, "min": np.fmin, "max": np.fmax,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


def update_of(op: Op) -> Update:
    """Return how an `async_tma_reduce` combines the bits in memory with those of its tile."""
    name, kind = op.text.partition(",")[0].strip(), op.inputs[0]
    if name not in _FUNCTIONS:
        raise op.error(f"the reduction {name!r} by TMA is not simulated")
    function, narrow = _FUNCTIONS[name], rounder(kind.elem)
    if not kind.is_float:
        dtype = np.dtype(f"{'u' if 'xui' in kind.text else 'i'}{kind.itemsize}")
        return lambda old, new: function(old.view(dtype), new.view(dtype)).view(old.dtype)

    def update(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        result = function(decode(old, kind.elem), decode(new, kind.elem))
        return encode(result if narrow is None else narrow(result), kind.elem)

    return update


