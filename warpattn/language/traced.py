"""What masks and scores share: a program traced once per value, and the checks of their parameters."""

from __future__ import annotations

from numbers import Integral
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from warpattn.errors import AttentionError
from warpattn.language.expr import Table, symbol

__all__ = ["Lengths", "Traced", "is_int", "kind_of", "require", "same_object"]

MAX_INT = 1 << 30  # sums of two such still fit the kernels' 32-bit ints


class Lengths(NamedTuple):
    """Queries and keys of the sequence at hand: ints, tensors or symbols."""

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


def is_int(value: Any, low: int) -> bool:
    """Whether `value` is an int (not a bool) from `low` to 2**30."""
    is_integer = type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))
    return is_integer and low <= int(value) <= MAX_INT


def require(ok: bool, what: str, rule: str) -> None:
    """Raise AttentionError unless `ok`."""
    if not ok:
        raise AttentionError(f"{what}; {rule}")


def kind_of(value: Any) -> str:
    """A value in an error message: tensors by dtype and shape."""
    return f"a {value.dtype} tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
