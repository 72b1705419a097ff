"""What masks and scores share: a program traced once per value, and the checks of their parameters."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from warpattn.errors import AttentionError
from warpattn.inputs import number
from warpattn.language.expr import Table, symbol

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

    Programs without captured tensors are shared between equal values, so that `Causal()` written anew in every call
    costs a dictionary lookup; others are kept by the object alone and live as long as it does.
    """

    SHARED_AT_MOST: ClassVar[int] = 4096
    shared: ClassVar[dict[Any, Any]] = {}

    def record(self) -> Any:
        """Trace this value; the result has `.tensors`."""
        raise NotImplementedError

    def program(self) -> Any:
        """The traced program, from memory after the first time."""
        program = self.__dict__.get("_program") or self.shared.get(self)
        if program is None:
            program = self.record()
            if not program.tensors:
                if len(self.shared) >= self.SHARED_AT_MOST:
                    self.shared.clear()
                self.shared[self] = program
        self.__dict__["_program"] = program
        return program


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
