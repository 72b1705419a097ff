"""Processes that compile kernels, forked from a server that imports what all of them need, once.

Nothing here imports torch, so that the server can begin before: its imports take as long as the caller's own.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import BaseContext

PRELOADED = ("triton.experimental.gluon", "triton.compiler")


def start(module: str) -> BaseContext:
    """The context of such processes, whose functions are in `module`; its server begins if there is none yet.

    Forked from a server, because the process that calls may have a card's context."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module, *PRELOADED])
    forkserver.ensure_running()
    return context
