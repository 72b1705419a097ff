"""Maps locations in TTGIR to lines of the user's Python, innermost first.

#loc7 = loc("kernel.py":34:5)      #loc9 = loc("x"(#loc7))      #loc11 = loc(callsite(#loc7 at #loc3))
"""

from __future__ import annotations

import ast
import linecache
import re
from functools import lru_cache
from typing import NamedTuple

_FILE = re.compile(r'"((?:[^"\\]|\\.)*)":(\d+):\d+')
_LIBRARY = re.compile(r"/triton/(language|experimental)/")  # Triton's own Python, which is left out
_MARK = re.compile(r"[()\[\]]| at ")
_ALIAS = re.compile(r"(#loc\d*) = loc\((.*)\)\s*$")


class Frame(NamedTuple):
    """A line of Python."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Locations:
    """The table of locations of one module."""

    def __init__(self, text: str) -> None:
        found = (_ALIAS.match(line) for line in text.splitlines() if line.startswith("#loc"))
        self._texts = {match[1]: match[2] for match in found if match}
        self._frames: dict[str, tuple[Frame, ...]] = {}

    def frames(self, text: str) -> tuple[Frame, ...]:
        """Return the lines of a location's text, the innermost call first; empty if unknown."""
        text = text.strip()
        if text not in self._frames:
            self._frames[text] = ()  # ends a cycle, which valid locations do not have
            self._frames[text] = self._resolve(text)
        return self._frames[text]

    def _resolve(self, text: str) -> tuple[Frame, ...]:
        if text.startswith("#loc"):
            return self.frames(self._texts.get(text, "unknown"))
        if text.startswith("callsite("):
            inner, outer = _halves(text[9:-1])
            return self.frames(inner) + self.frames(outer)
        if text.startswith("fused"):
            first = text.partition("[")[2].rstrip("])").split(",")[0]
            return self.frames(first)
        found = _FILE.match(text)
        if found:
            return () if _LIBRARY.search(found[1]) else (Frame(found[1], int(found[2])),)
        named = re.match(r'"(?:[^"\\]|\\.)*"\((.*)\)$', text)
        return self.frames(named[1]) if named else ()


def _halves(text: str) -> tuple[str, str]:
    """Split at the ` at ` outside of brackets and strings."""
    depth = 0
    for found in _MARK.finditer(text):
        depth += (found[0] in ("(", "[")) - (found[0] in (")", "]"))
        if depth == 0 and found[0] == " at ":
            return text[: found.start()], text[found.end() :]
    return text, "unknown"


@lru_cache(256)
def enclosing_function(file: str, line: int) -> str:
    """Return the Python function that contains a line; empty if the source cannot be read."""
    source = "".join(linecache.getlines(file))
    best, size = "", 1 << 30
    for name, first, last in _functions(source):
        if first <= line <= last and last - first < size:
            best, size = name, last - first
    return best


@lru_cache(64)
def _functions(source: str) -> tuple[tuple[str, int, int], ...]:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    starts = [min([node.lineno, *(d.lineno for d in node.decorator_list)]) for node in found]
    return tuple((node.name, first, node.end_lineno or first) for node, first in zip(found, starts, strict=False))
