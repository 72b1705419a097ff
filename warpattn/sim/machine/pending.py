"""Results of matrix products that must not be used: not waited for yet, or made of bytes that nobody has written.

Moving one (through loops and branches) is fine. Whatever tries to compute with it raises PendingRead, which the
interpreter reports before it goes on with the value; ordinary values pay nothing for the check.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..memory.findings import Finding, Place

if TYPE_CHECKING:
    from .agents import Agent


class PendingRead(Exception):
    """A pending result was read."""


class Pending:
    """Stands for the result of an agent."""

    __slots__ = ("agent",)
    agent: Agent

    def __init__(self, agent: Agent) -> None:
        object.__setattr__(self, "agent", agent)

    def value(self) -> Any:
        """The result; the agent is made to run if it has not."""
        self.agent.run()
        return self.agent.result

    def finding(self, place: Place) -> Finding:
        """What it means that `place` reads it."""
        text = f"{place} reads the result of {self.agent.place} before waiting for it"
        return Finding("Race", text, (place, self.agent.place), buffer="registers")

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise PendingRead

    def __getattr__(self, name: str) -> Any:
        raise PendingRead

    __array__ = __array_ufunc__ = __array_function__ = __getitem__ = __len__ = __iter__ = __bool__ = __index__ = _refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __float__ = __int__ = _refuse


class Undefined(Pending):
    """Stands for a finished result with operands that nobody has written; harmless as long as nothing uses it."""

    def finding(self, place: Place) -> Finding:
        return self.agent.unwritten or super().finding(place)
