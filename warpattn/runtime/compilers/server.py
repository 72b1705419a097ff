"""Starts the server that compiling processes are forked from.

Nothing here imports torch, so the server can start before the caller imports it: both imports then run in parallel.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.context import BaseContext

FIRST = "warpattn.runtime.compilers.digests"  # its thread reads while the others are imported
PRELOADED = ("triton.experimental.gluon", "triton.compiler", "warpattn.runtime.compilers.begun")
HOPPER = "warpattn.kernels.sm90"
KERNELS: Mapping[str, tuple[str, ...]] = {  # by architecture, those that engines call
    "sm90": (f"{HOPPER}.select", f"{HOPPER}.prefill_varlen.signature", f"{HOPPER}.decode.signature"),
}


def start(module: str, arch: str | None = None) -> BaseContext:
    """Return a multiprocessing context for processes that run functions of `module` and compile for `arch`, if known;
    starts the server if there is none yet.

    Processes are forked from a server because the calling process may have a GPU's context."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([FIRST, module, *PRELOADED, *KERNELS.get(arch or "", ())])
    forkserver.ensure_running()
    return context
