"""Values that must not be used: results of matrix products not waited for, and elements that were never written.

Moving one (through loops and branches) is allowed. Computing with one raises PendingRead; the interpreter then reports
the use, or carries undefined elements on to the result. Ordinary values need no check.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..memory.findings import Finding, Place
from ..memory.shared import Missing
from .agents import Agent


class PendingRead(Exception):
    """Raised if a value is used that must not be."""


class Unusable:
    """Refuses every use of a value."""

    __slots__ = ()

    def value(self) -> Any:
        """Return the value nevertheless."""
        raise NotImplementedError

    def finding(self, place: Place) -> Finding:
        """Make the finding that `place` uses it."""
        raise NotImplementedError

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise PendingRead

    def __getattr__(self, name: str) -> Any:
        raise PendingRead

    __array__ = __array_ufunc__ = __array_function__ = __getitem__ = __len__ = __iter__ = __bool__ = __index__ = _refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __float__ = __int__ = _refuse
    __eq__ = __ne__ = __abs__ = __mod__ = __rmod__ = __rfloordiv__ = __rtruediv__ = __lshift__ = __rshift__ = _refuse
    __rand__ = __ror__ = __rxor__ = __invert__ = __pow__ = __rpow__ = _refuse
    __hash__ = object.__hash__
    __lt__ = __le__ = __gt__ = __ge__ = __and__ = __or__ = __xor__ = __neg__ = __truediv__ = __floordiv__ = _refuse


class Pending(Unusable):
    """The result of an agent that has not been waited for, or a part of it."""

    __slots__ = ("agent", "part")
    agent: Agent
    part: int | None

    def __init__(self, agent: Agent, part: int | None = None) -> None:
        object.__setattr__(self, "agent", agent)
        object.__setattr__(self, "part", part)

    def value(self) -> Any:
        """Return the result; runs the agent if it has not run."""
        self.agent.run()
        return self.agent.result if self.part is None else self.agent.result[self.part]

    @property
    def missing(self) -> Missing | None:
        """The elements of the result that depend on unwritten operands."""
        return self.agent.missing if self.part is None else self.agent.missing[self.part]

    def finding(self, place: Place) -> Finding:
        """Make the finding of a race with the product."""
        text = f"{place} reads the result of {self.agent.place} before waiting for it"
        return Finding("Race", text, (place, self.agent.place), buffer="registers")


class Poisoned(Unusable):
    """A value with elements that were never written: a finding only if they are used."""

    __slots__ = ("missing", "plain")
    plain: Any
    missing: Missing

    def __init__(self, plain: Any, missing: Missing) -> None:
        object.__setattr__(self, "plain", plain)
        object.__setattr__(self, "missing", missing)

    def value(self) -> Any:
        """Return the value, with arbitrary unwritten elements."""
        return self.plain

    def finding(self, place: Place) -> Finding:
        """Make the finding of the read of unwritten memory, with the line that uses it."""
        return used(self.missing, place)


def used(missing: Missing, place: Place) -> Finding:
    """Make the finding that `place` uses undefined elements; arithmetic that made them does not know its role."""
    fault = missing.fault
    if place in fault.places:
        return fault
    places = tuple(Place(known.role or place.role, known.frames) for known in fault.places)
    return replace(fault, message=f"{fault.message}; {place} uses it", places=(*places, place))


def poisoned(plain: Any, missing: Missing | None) -> Any:
    """Attach undefined elements to a value; return the value itself if there are none."""
    if missing is None or not np.any(missing.where):
        return plain
    return Poisoned(plain, missing)


def opened(value: Any) -> tuple[Any, Missing | None]:
    """Return a value and its undefined elements."""
    return (value.plain, value.missing) if isinstance(value, Poisoned) else (value, None)
