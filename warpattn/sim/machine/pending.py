"""Results of matrix products that must not be used: not waited for yet, or made of bytes that were never written.

Moving one (through loops and branches) is allowed. Computing with one raises PendingRead; the interpreter reports that
and continues with the value. Ordinary values pay nothing for the check.
"""

from __future__ import annotations

from typing import Any

from ..memory.findings import Finding, Place
from .agents import Agent


class PendingRead(Exception):
    """A pending result was read."""


class Pending:
    """The result of an agent that has not been waited for."""

    __slots__ = ("agent",)
    agent: Agent

    def __init__(self, agent: Agent) -> None:
        object.__setattr__(self, "agent", agent)

    def value(self) -> Any:
        """The result; the agent is made to run if it has not."""
        self.agent.run()
        return self.agent.result

    def finding(self, place: Place) -> Finding:
        """The finding that `place` reads it."""
        text = f"{place} reads the result of {self.agent.place} before waiting for it"
        return Finding("Race", text, (place, self.agent.place), buffer="registers")

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise PendingRead

    def __getattr__(self, name: str) -> Any:
        raise PendingRead

    __array__ = __array_ufunc__ = __array_function__ = __getitem__ = __len__ = __iter__ = __bool__ = __index__ = _refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __float__ = __int__ = _refuse


class Undefined(Pending):
    """A finished result of operands that were never written; a finding only if something uses it."""

    def finding(self, place: Place) -> Finding:
        return self.agent.unwritten or super().finding(place)
