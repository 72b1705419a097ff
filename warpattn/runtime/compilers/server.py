"""The server that compiling processes are forked from.

Nothing here imports torch, so that it can begin before: its imports take as long as the caller's own.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.context import BaseContext

FIRST = "warpattn.runtime.compilers.digests"  # reads while the others are imported
PRELOADED = ("triton.experimental.gluon", "triton.compiler", "warpattn.runtime.compilers.begun")
HOPPER = "warpattn.kernels.sm90"
KERNELS: Mapping[str, tuple[str, ...]] = {  # by architecture, as far as engines call them
    "sm90": (f"{HOPPER}.select", f"{HOPPER}.prefill_varlen.signature", f"{HOPPER}.decode.signature"),
}


def start(module: str, arch: str | None = None) -> BaseContext:
    """The context of such processes, whose functions are in `module` and which compile for `arch`, if that is known;
    its server begins if there is none yet.

    Forked from a server, because the process that calls may have a card's context."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([FIRST, module, *PRELOADED, *KERNELS.get(arch or "", ())])
    forkserver.ensure_running()
    return context
