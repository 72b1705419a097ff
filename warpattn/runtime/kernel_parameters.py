"""Reads the parameters of a compiled kernel from its signature, tuples flattened.

    signature   {"q_desc": "tensordesc<bf16[1, 64, 1, 128],…>", "shape": ("i32", "i32"), "config": "constexpr"}
    parameters  map q_desc · i32 shape.0 · i32 shape.1

They are read from Triton's type strings when a kernel is compiled and kept with its machine code, so that a process
that finds the kernel on disk can launch it without Triton.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from warpattn.problem.argument_types import fields

SCRATCH = ("ptr", "ptr")  # Triton's last two arguments of each kernel: global and profiling scratch memory, unused
_SCALARS = {"i32": "i32", "u32": "i32", "i64": "i64", "u64": "i64", "fp32": "f32", "f32": "f32"}
_DESCRIPTOR = re.compile(r"tensordesc<(\w+)\[([\d, ]+)\],.*swizzle_byte_width=(\d+)")
_SPLIT = re.compile(r"cga_layout=\[(\[[\d, ]+\](?:, \[[\d, ]+\])*)\]")


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel. Parts of tuples are parameters of their own, with names such as `shape.seq_q`, or
    `shape.0` if they have no name."""

    name: str
    kind: str  # "map" | "ptr" | "i32" | "i64" | "f32"
    dtype: str = ""  # of a map's elements, "bf16" or "fp16"
    box: tuple[int, ...] = ()  # of a map, in elements: what one CTA copies
    swizzle: int = 0  # of a map, bytes

    def fields(self) -> dict[str, Any]:
        """Return the fields for JSON; `Parameter(**fields)` reads them back."""
        return asdict(self)

    def __post_init__(self) -> None:
        object.__setattr__(self, "box", tuple(self.box))


def parameters(signature: Mapping[str, Any]) -> tuple[Parameter, ...]:
    """Return the parameters of a kernel compiled with Triton's `signature`, without its constants."""
    return tuple(found for name, kind in signature.items() for found in _parse(name, kind))


def _parse(name: str, kind: Any) -> Iterator[Parameter]:
    if isinstance(kind, tuple):
        for field, part in fields(kind):
            yield from _parse(f"{name}.{field}", part)
    elif kind.startswith("*"):
        yield Parameter(name, "ptr")
    elif (found := _DESCRIPTOR.match(kind)) is not None:
        dtype, box, swizzle = found.groups()
        yield Parameter(name, "map", dtype, _of_a_cta([int(n) for n in box.split(",")], kind), int(swizzle))
    elif kind != "constexpr":
        yield Parameter(name, _SCALARS[kind])


def _of_a_cta(block: list[int], kind: str) -> tuple[int, ...]:
    """Return the part of a block that one CTA of a cluster copies: each nonzero basis of its layout halves an axis."""
    found = _SPLIT.search(kind)
    for basis in found[1].strip("[]").split("], [") if found else ():
        for axis, step in enumerate(basis.split(",")):
            block[axis] //= 2 if int(step) else 1
    return tuple(block)
