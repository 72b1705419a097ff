"""Starts the server that compiling processes are forked from.

Nothing here imports torch, so the server can start before the caller imports it: both imports then run in parallel.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Mapping
from multiprocessing import forkserver, popen_forkserver, spawn
from multiprocessing.context import BaseContext, ForkServerContext, ForkServerProcess
from typing import Any

FIRST = "warpattn.runtime.compilers.digests"  # its thread reads while the others are imported
PRELOADED = ("triton.experimental.gluon", "triton.compiler", "warpattn.runtime.compilers.begun")
HOPPER = "warpattn.kernels.sm90"
KERNELS: Mapping[str, tuple[str, ...]] = {  # by architecture, those that engines call
    "sm90": (f"{HOPPER}.select", f"{HOPPER}.prefill_varlen.signature", f"{HOPPER}.decode.signature"),
}
_starting = threading.Lock()


class _Popen(popen_forkserver.Popen):
    """Starts a process that does not run the caller's script: one without a guard would call `warm` again, and what is
    read from standard input or a notebook is in no file."""

    def _launch(self, process_obj: Any) -> None:
        with _starting:
            whole = spawn.get_preparation_data

            def without_script(name: str) -> dict[str, Any]:
                data = whole(name)  # other threads may start processes of their own meanwhile
                ours = name is process_obj._name
                return {key: x for key, x in data.items() if not (ours and key.startswith("init_main"))}

            spawn.get_preparation_data = without_script
            try:
                super()._launch(process_obj)  # pyright: ignore[reportAttributeAccessIssue]
            finally:
                spawn.get_preparation_data = whole


class _Process(ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _Popen(process_obj)


class _Context(ForkServerContext):
    Process = _Process


def can_be_sent(task: object) -> bool:
    """Whether a compiling process can read a task: it can be pickled, and nothing in it is defined in the caller's
    script, which these processes do not run."""
    try:
        return b"__main__" not in pickle.dumps(task)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False


def start(module: str, arch: str | None = None) -> BaseContext:
    """Return a multiprocessing context for processes that run functions of `module` and compile for `arch`, if known;
    starts the server if there is none yet.

    Processes are forked from a server because the calling process may have a GPU's context."""
    context = _Context()
    context.set_forkserver_preload([FIRST, module, *PRELOADED, *KERNELS.get(arch or "", ())])
    forkserver.ensure_running()
    return context
