"""Values that are made of a function of users: two are equal where function, captured values and all that it reads are.

A function is traced once, and equal values share the program, so what the function reads is part of its identity (see
`meaning`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from warpattn.language.meaning import UnknownError, meaning


class OfFunction:
    """A frozen value that is made of a function of users and of what that captures."""

    fn: Callable[..., Any]
    captured: tuple[tuple[str, Any], ...]

    @cached_property
    def _meaning(self) -> object:
        try:
            return meaning((self.fn, self.captured))
        except UnknownError:
            return object()  # equal to itself alone

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._meaning == self._meaning  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash(self._meaning)
