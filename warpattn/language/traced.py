"""What masks and scores share: a program traced once per value, and the checks of their parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from warpattn.errors import AttentionError
from warpattn.inputs import number
from warpattn.language.expr import Table, symbols
from warpattn.language.meaning import UnknownError, contents, is_users, meaning
from warpattn.language.user_code import named, raised_at

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

    Programs without captured tensors are shared between values of one meaning, so that `Causal()` written anew in every
    call costs a dictionary lookup; others are kept by the object alone and live as long as it does.
    """

    SHARED_AT_MOST: ClassVar[int] = 4096
    ALONE: ClassVar[bool] = False  # whether programs of a class are kept by their objects alone
    shared: ClassVar[dict[Any, Any]] = {}

    def record(self) -> Any:
        """Trace this value; the result has `.tensors`."""
        raise NotImplementedError

    def program(self) -> Any:
        """The traced program, from memory after the first time."""
        return self.__dict__.get("_program") or self._unchanged() or self._remembered()

    def known_program(self) -> Any:
        """The program if it is in memory; LookupError if it must be traced."""
        return self.__dict__.get("_program") or self._unchanged() or self.shared[meaning(self)]

    def _unchanged(self) -> Any:
        """The program of a value that holds what may change, None before it is traced; AttentionError if it changed."""
        if "_held" not in self.__dict__:
            return None
        held, program = self.__dict__["_held"]
        if contents(self, {}) != held:
            what = f"what a {type(self).__name__} holds has changed after a call has read it"
            raise AttentionError(f"{what}; masks and scores do not change, so make a new one")
        return program

    def _remembered(self) -> Any:
        try:
            key = None if self.ALONE else meaning(self)
        except UnknownError:
            key = None
        program = None if key is None else self.shared.get(key)
        if program is None:
            try:
                program = self.record()
            except AttentionError:
                raise
            except Exception as error:
                self._blame(error)
                raise
            if key is not None and not program.tensors:
                if len(self.shared) >= self.SHARED_AT_MOST:
                    self.shared.clear()
                self.shared[key] = program
        if key is None:
            _keep(self, program)
        else:
            self.__dict__["_program"] = program
        return program

    def _blame(self, error: Exception) -> None:
        """AttentionError for what a user's code or class did wrong; nothing if no such code took part."""
        own = [f"a {type(part).__name__}" for part in _values(self) if is_users(part)]
        where = [line for line in (raised_at(error), *own) if line is not None]
        if where:
            rule = "masks and scores use operators and warpattn's functions"
            raise AttentionError(f"{where[0]}: {named(error)}; {rule}") from error

    def __bool__(self) -> bool:
        """Python's `and` and `or` would take one of two masks and drop the other without a word."""
        what = f"a {type(self).__name__} has no truth value (if, and, or, not)"
        raise AttentionError(f"{what}; combine masks with & | ~ and scores with |, compare with None by `is`")

    def __setattr__(self, name: str, value: Any) -> None:
        if "_fixed" in self.__dict__:
            what = f"{name} of a {type(self).__name__} is set after a call has read it"
            raise AttentionError(f"{what}; masks and scores do not change, so make a new one")
        object.__setattr__(self, name, value)


def _keep(value: Traced, program: Any) -> None:
    """Let a value that has been traced remember its program. No attribute of it can be set any more, nor of its parts;
    where an object that it holds may change, it remembers what that was, too."""
    for part in _values(value):
        part.__dict__["_fixed"] = True
    changing: dict[int, Any] = {}
    held = contents(value, changing)
    value.__dict__.update({"_held": (held, program)} if changing else {"_program": program})


def _values(value: Any) -> Iterator[Traced]:
    """A mask or score, and those that it is made of."""
    if isinstance(value, Traced):
        yield value
    for part in value if isinstance(value, tuple) else getattr(value, "__dict__", {}).values():
        if isinstance(part, tuple | Traced) or is_dataclass(part):
            yield from _values(part)


def same_object(value: Any) -> Any:
    """`value`, a tensor wrapped so that it compares and hashes by identity."""
    return Table(value) if isinstance(value, Tensor) else value


def whole(value: Any, low: int) -> int | None:
    """`value` as an int (NumPy's ints and tensors without dimensions count, bools do not) from `low` to 2**30; None
    if it is none."""
    found = value if type(value) is int else number(value)
    return found if isinstance(found, int) and low <= found <= MAX_INT else None


def settle(owner: object, name: str, value: Any) -> None:
    """Give a field of a frozen value the number that was understood."""
    if getattr(owner, name) is not value:
        object.__setattr__(owner, name, value)


def require(ok: bool, what: str, rule: str) -> None:
    """Raise AttentionError unless `ok`."""
    if not ok:
        raise AttentionError(f"{what}; {rule}")
