"""Types of TTGIR values as small immutable objects, parsed from their text once.

i32 · f32 · !tt.ptr<bf16>        scalars: shape is None
tensor<64x128xf32, #mma>         shape (64, 128); the layout stays text, values do not depend on it
!ttg.memdesc<2x64x64xbf16, …>    a view of shared memory
!tt.tensordesc<64x64xbf16, …>    a TMA descriptor with the shape of its box
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

_WRAPPERS = {"tensor": "tensor", "!ttg.memdesc": "memdesc", "!tt.tensordesc": "desc"}
_WRAPPERS["!ttng.tensordesc_im2col"] = "desc"
_WRAPPERS[""] = "memdesc"  # so copies by threads print the type of their target
_MARKS = {mark: re.compile(rf"->|[<(\[{{)\]}}>]|{re.escape(mark)}") for mark in (",", "*", " : ", "->")}
_DIMS = re.compile(r"((?:\d+x)*)(.+)")


@dataclass(frozen=True)
class Type:
    """kind: scalar, tensor, memdesc, desc or other; elem: i1 … i64, index, f16, bf16, f32, f64, f8…, or ptr."""

    kind: str
    elem: str
    shape: tuple[int, ...] | None
    text: str
    pointee: str = ""

    @property
    def is_float(self) -> bool:
        return self.elem[0] in "fb" or self.elem == "tf32"

    @property
    def bits(self) -> int:
        """Bits of one element in memory."""
        return element_bits(self.elem)

    @property
    def itemsize(self) -> int:
        """Bytes of one element in memory."""
        return max(1, self.bits // 8)

    @property
    def of_pixels(self) -> bool:
        """Whether a descriptor is in im2col mode: its box has pixels and channels, whatever rank its tensor has."""
        return self.text.startswith("!ttng.tensordesc_im2col")

    def lifted(self) -> Type:
        """The tensor type of a scalar in a reduction's body, which runs on whole arrays; its shape is left open."""
        return replace(self, kind="tensor", shape=()) if self.kind == "scalar" else self

    def __str__(self) -> str:
        return self.text


@cache
def element_bits(elem: str) -> int:
    """Bits of one element of an element type in memory."""
    if elem == "ptr" or elem == "index":
        return 64
    if elem == "tf32":
        return 32
    found = re.match(r"(?:bf|[fi])(\d+)", elem)
    if found is None:
        raise ValueError(f"{elem} is no element type")
    return int(found[1])


@cache
def parse_type(text: str) -> Type:
    """Parse a type; an unknown one has kind `other`."""
    text = text.strip()
    if text.startswith("!tt.ptr<"):
        return Type("scalar", "ptr", None, text, split_top(text[8:-1])[0])
    if re.fullmatch(r"i\d+|index|bf16|tf32|f\d+\w*", text):
        return Type("scalar", text, None, text)
    head, _, inner = text.partition("<")
    kind = _WRAPPERS.get(head)
    if kind is None or not inner:
        return Type("other", "i64", None, text)
    body = split_top(inner[:-1])[0]
    dims, elem = _DIMS.fullmatch(body).groups()  # pyright: ignore[reportOptionalMemberAccess]
    shape = tuple(int(d) for d in dims.split("x") if d)
    if elem.startswith("!tt.ptr<"):
        return Type(kind, "ptr", shape, text, split_top(elem[8:-1])[0])
    return Type(kind, re.sub(r"^[su](?=i\d)", "", elem), shape, text)  # descriptors know signs: si32


def split_top(text: str, separator: str = ",") -> list[str]:
    """Split `text` at separators outside of brackets."""
    parts, start = [], 0
    for at in places_at_top(text, separator):
        parts.append(text[start:at].strip())
        start = at + len(separator)
    parts.append(text[start:].strip())
    return [part for part in parts if part]


def places_at_top(text: str, mark: str) -> Iterator[int]:
    """Yield where `mark`, one of `_MARKS`, begins outside of brackets; an arrow's end closes none."""
    depth = 0
    for found in _MARKS[mark].finditer(text):
        if found[0] in ("<", "(", "[", "{"):
            depth += 1
        elif found[0] in (">", ")", "]", "}"):
            depth -= 1
        elif found[0] == mark and depth == 0:
            yield found.start()
