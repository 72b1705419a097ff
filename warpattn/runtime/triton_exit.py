"""Frees Triton's compiler when a process ends, so that it ends without a report of leaks.

Triton's C++ part keeps the classes of Gluon's layouts for good, and torch's keeps functions whose globals reach Triton.
From each of them a chain leads through the namespaces of Triton's modules to the compiler's own types:

    layout class ─▶ its methods ─▶ their globals ─▶ every module of Triton ─▶ GluonOpBuilder, its 326 functions

Python empties a module's namespace at exit only if the module itself is still alive; here only its namespace is. So
nanobind, which binds the types, finds them alive at the very end and prints 24 lines that look like a crash.
Emptying the namespaces as the first step of the exit cuts every such chain.
"""

from __future__ import annotations

import sys

GLUON = "triton.experimental.gluon"


def release_triton() -> None:
    """Empty the namespaces of Triton's Python modules if Gluon was imported; Triton cannot be used afterwards."""
    if GLUON not in sys.modules:
        return
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "triton" and not name.startswith("triton._C"):
            vars(module).clear()
