"""The base class of masks and scores, which traces a program once per value, and checks of their parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from warpattn.errors import AttentionError
from warpattn.inputs import number, of_type
from warpattn.language.expr import Table, symbols
from warpattn.language.meaning import NOT_STATE, UnknownError, contents, is_users, meaning, slots
from warpattn.language.user_code import named, raised_at

NESTED = 100  # so many levels always fit Python's usual stack
MAX_INT = 1 << 30  # sums of two such still fit the kernels' 32-bit ints


class Lengths(NamedTuple):
    """Queries and keys of a sequence: ints, tensors or symbols."""

    q: Any
    k: Any

    @classmethod
    def symbols(cls) -> Lengths:
        """The symbols len_q and len_k."""
        return cls(*symbols("len_q", "len_k"))


class Traced:
    """A frozen value with a program that is traced once.

    Values with equal keys (`meaning`) share programs without captured tensors, so a new `Causal()` in every call costs
    a dictionary lookup; other programs belong to one object and live as long as it does.
    """

    SHARED_AT_MOST: ClassVar[int] = 4096
    ALONE: ClassVar[bool] = False  # whether objects of a class never share programs
    shared: ClassVar[dict[Any, Any]] = {}

    def record(self) -> Any:
        """Trace this value; the result has `.tensors`."""
        raise NotImplementedError

    def program(self) -> Any:
        """Return the program; traces it the first time."""
        try:
            return self.__dict__.get("_program") or self._unchanged() or self._remembered()
        except RecursionError as error:
            refuse_nested(self, error)
            self._blame(error)
            raise

    def known_program(self) -> Any:
        """Return the program if it has been traced; raises LookupError if not."""
        return self.__dict__.get("_program") or self._unchanged() or self.shared[meaning(self)]

    def _unchanged(self) -> Any:
        """Return the program of a value with parts that may change, None if not traced; AttentionError if one did."""
        if "_held" not in self.__dict__:
            return None
        held, program = self.__dict__["_held"]
        if contents(self, {}) != held:
            what = f"what {of_type(self)} reads or holds has changed after a call has read it"
            raise AttentionError(f"{what}; masks and scores do not change, so make a new one")
        return program

    def _remembered(self) -> Any:
        may_change = any(_runs_users_code(part) for part in _values(self))
        try:
            key = None if self.ALONE else meaning(self)
        except UnknownError:
            key = None
        program = None if key is None else self.shared.get(key)
        if program is None:
            try:
                program = self.record()
            except (AttentionError, RecursionError):
                raise
            except Exception as error:
                self._blame(error)
                raise
            if key is not None and not program.tensors:
                if len(self.shared) >= self.SHARED_AT_MOST:
                    self.shared.clear()
                self.shared[key] = program
        if key is None or may_change:
            _keep(self, program)
        else:
            self.__dict__["_program"] = program
        return program

    def _blame(self, error: Exception) -> None:
        """Raise AttentionError if an error came from a user's code or class; else do nothing."""
        own = [of_type(part) for part in _values(self) if is_users(part)]
        where = [line for line in (raised_at(error), *own) if line is not None]
        if where:
            rule = "masks and scores use operators and warpattn's functions"
            raise AttentionError(f"{where[0]}: {named(error)}; {rule}") from error

    def __getstate__(self) -> Any:
        """Return the state of a copy, which no call has read: attributes, and those in slots if there are any."""
        own = {name: each for name, each in self.__dict__.items() if name not in NOT_STATE}
        in_slots = {name: getattr(self, name) for name in slots(type(self)) if hasattr(self, name)}
        return (own, in_slots) if in_slots else own

    def __bool__(self) -> bool:
        """Raise: Python's `and` and `or` would silently drop one of two masks."""
        what = f"{of_type(self)} has no truth value (if, and, or, not)"
        raise AttentionError(f"{what}; combine masks with & | ~ and scores with |, compare with None by `is`")

    def __setattr__(self, name: str, value: Any) -> None:
        if "_fixed" in self.__dict__:
            what = f"{name} of {of_type(self)} is set after a call has read it"
            raise AttentionError(f"{what}; masks and scores do not change, so make a new one")
        object.__setattr__(self, name, value)


def _keep(value: Traced, program: Any) -> None:
    """Store the program in the traced value. From then on no attribute of the value or its parts can be set; if it
    holds mutable objects, a snapshot of them is stored, too."""
    for part in _values(value):
        part.__dict__["_fixed"] = True
    changing: dict[int, Any] = {}
    held = contents(value, changing)
    value.__dict__.update({"_held": (held, program)} if changing else {"_program": program})


def _values(value: Any) -> Iterator[Traced]:
    """Yield a mask or score, and those that it is made of."""
    if isinstance(value, Traced):
        yield value
    for part in value if isinstance(value, tuple) else getattr(value, "__dict__", {}).values():
        if isinstance(part, tuple | Traced) or is_dataclass(part):
            yield from _values(part)


def _runs_users_code(part: Traced) -> bool:
    """Whether a mask or score is of a user's class, or made of a function, which may read what changes later."""
    return "fn" in part.__dict__ or not type(part).__module__.startswith("warpattn.")


def refuse_nested(value: Traced, error: RecursionError) -> None:
    """Raise AttentionError if a mask or score is so deep that this can be why Python's stack has ended."""
    depth, level = 0, {id(value): value}
    while level:
        depth += 1
        level = {id(x): x for one in level.values() for x in vars(one).values() if isinstance(x, Traced)}
    if depth > NESTED:
        what = f"{depth} levels of masks or scores are too many for Python's stack"
        raise AttentionError(f"{what}; combine many in pairs, as in (a | b) | (c | d)") from error


def same_object(value: Any) -> Any:
    """Return `value`; a tensor is wrapped so that it compares and hashes by identity."""
    return Table(value) if isinstance(value, Tensor) else value


def whole(value: Any, low: int) -> int | None:
    """Return `value` as an int from `low` to 2**30, else None. NumPy ints and tensors without dimensions count, bools
    do not."""
    found = value if type(value) is int else number(value)
    return found if isinstance(found, int) and low <= found <= MAX_INT else None


def settle(owner: object, name: str, value: Any) -> None:
    """Set a field of a frozen value to the number that it was read as."""
    if getattr(owner, name) is not value:
        object.__setattr__(owner, name, value)


def require(ok: bool, what: str, rule: str) -> None:
    """Raise AttentionError unless `ok`."""
    if not ok:
        raise AttentionError(f"{what}; {rule}")
