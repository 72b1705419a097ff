"""Base class of masks and scores made of a user's function; two are equal if the function and all that it reads are.

A function is traced once, and equal values share the program, so everything that the function reads is part of its
identity (see `meaning`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from warpattn.language.meaning import UnknownError, meaning


class OfFunction:
    """A frozen value made of a user's function and its captured values."""

    fn: Callable[..., Any]
    captured: tuple[tuple[str, Any], ...]

    @cached_property
    def _meaning(self) -> object:
        try:
            return meaning((self.fn, self.captured))
        except UnknownError:
            return object()  # equal only to itself

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._meaning == self._meaning  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash(self._meaning)
