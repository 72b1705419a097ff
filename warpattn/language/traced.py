"""What masks and scores share: a program traced once per value, and the checks of their parameters."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from warpattn.errors import AttentionError
from warpattn.inputs import number
from warpattn.language.expr import Table, symbol
from warpattn.language.meaning import UnknownError, meaning

MAX_INT = 1 << 30  # sums of two such still fit the kernels' 32-bit ints


class Lengths(NamedTuple):
    """Queries and keys of a sequence: ints, tensors or symbols."""

    q: Any
    k: Any

    @classmethod
    def symbols(cls) -> Lengths:
        """The symbols len_q and len_k."""
        return cls(symbol("len_q"), symbol("len_k"))


class Traced:
    """A frozen value with a program that is traced once.

    Programs without captured tensors are shared between values of one meaning, so that `Causal()` written anew in every
    call costs a dictionary lookup; others are kept by the object alone and live as long as it does.
    """

    SHARED_AT_MOST: ClassVar[int] = 4096
    shared: ClassVar[dict[Any, Any]] = {}

    def record(self) -> Any:
        """Trace this value; the result has `.tensors`."""
        raise NotImplementedError

    def program(self) -> Any:
        """The traced program, from memory after the first time."""
        program = self.__dict__.get("_program")
        return self._remembered() if program is None else program

    def known_program(self) -> Any:
        """The program if it is in memory; LookupError if it must be traced."""
        return self.__dict__.get("_program") or self.shared[meaning(self)]

    def _remembered(self) -> Any:
        try:
            key = meaning(self)
        except UnknownError:
            key = None
        program = None if key is None else self.shared.get(key)
        if program is None:
            program = self.record()
            if key is not None and not program.tensors:
                if len(self.shared) >= self.SHARED_AT_MOST:
                    self.shared.clear()
                self.shared[key] = program
        self.__dict__["_program"] = program
        if key is None:
            _fix(self)
        return program

    def __setattr__(self, name: str, value: Any) -> None:
        if "_fixed" in self.__dict__:
            what = f"{name} of a {type(self).__name__} is set after a call has read it"
            raise AttentionError(f"{what}; masks and scores do not change, so make a new one")
        object.__setattr__(self, name, value)


def _fix(value: Any) -> None:
    """Let no attribute of a value that has been traced be set any more, nor of its parts."""
    if isinstance(value, Traced):
        value.__dict__["_fixed"] = True
    parts = value if isinstance(value, tuple) else getattr(value, "__dict__", {}).values()
    for part in parts:
        if isinstance(part, tuple | Traced) or is_dataclass(part):
            _fix(part)


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
