"""Messages of a kernel: `device_print` prints, a `device_assert` that fails is a finding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..ir.module import Op
from ..machine.registry import acting
from ..memory.findings import Finding


@acting("tt.print")
def _print(op: Op) -> Callable[..., Any]:
    prefix = op.strings[0].strip() if op.strings else ""
    hexadecimal = "hex = true" in op.raw

    def run(role: Any, *values: Any) -> None:
        shown = [_shown(np.asarray(value), hexadecimal) for value in values]
        print(f"pid {tuple(int(i) for i in role.program.index)}: {prefix} {' '.join(shown)}".rstrip())

    return run


def _shown(value: np.ndarray, hexadecimal: bool) -> str:
    """Format a value; integers in hexadecimal if the kernel says so."""
    if not hexadecimal or value.dtype.kind == "f":
        return np.array2string(value, threshold=64)
    bits = 8 * value.dtype.itemsize
    return np.array2string(value, threshold=64, formatter={"int": lambda n: f"{int(n) % (1 << bits):#x}"})


@acting("tt.assert")
def _assert(op: Op) -> Callable[..., Any]:
    message = op.strings[0] if op.strings else "assertion"

    def run(role: Any, condition: Any, *_: Any) -> None:
        if not np.all(condition):
            place = role.place()
            role.run.findings.add(Finding("AssertionFailed", f"{place}: {message}", (place,)))

    return run
