"""The table from names of operations to builders of the functions that run them.

A builder takes a parsed Op once and returns the function that is called every time the op runs, so that types and
attributes are read once. The kinds differ in that function's arguments:

    plain     run(*operands)              computes; touches nothing
    acting    run(role, *operands)        touches memory, barriers or asynchronous work
    blocking  run(role, *operands)        the same, and a generator: it may wait
    flow      run(role, registers)        a generator that runs the op's regions
    end       –                           ends a region with its operands
    jump      run(role, registers)        a generator that returns the next block
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..ir.module import Op

PLAIN, ACTING, BLOCKING, FLOW, END, JUMP = range(6)
Builder = Callable[[Op], Callable[..., Any]]

TABLE: dict[str, tuple[int, Builder]] = {}

# Operations that act for a role but do not change state that a role could see: views, loads, waits. Atomic operations
# count their changes themselves (`Run.changes`).
LOOKING = frozenset((
    "tt.load", "tt.get_program_id", "tt.get_num_programs", "tt.int_to_ptr", "tt.ptr_to_int", "tt.atomic_load",
    "tt.atomic_poll", "tt.atomic_rmw", "tt.atomic_cas", "ttg.local_load", "ttg.local_gather", "ttg.memdesc_index",
    "ttg.memdesc_subslice", "ttg.memdesc_trans", "ttg.memdesc_reshape", "ttg.memdesc_reinterpret", "ttg.async_wait",
    "ttng.tmem_load", "ttng.tmem_subslice", "ttng.wait_barrier", "ttng.warp_group_dot_wait",
    "ttng.async_tma_store_wait", "ttng.fence_async_shared", "amdg.buffer_load",
    "tt.elementwise_inline_asm",
))  # fmt: skip


def _register(kind: int, names: tuple[str, ...]) -> Callable[[Builder], Builder]:
    def add(builder: Builder) -> Builder:
        for name in names:
            TABLE[name] = (kind, builder)
        return builder

    return add


def plain(*names: str) -> Callable[[Builder], Builder]:
    """Register a builder of ops that only compute."""
    return _register(PLAIN, names)


def acting(*names: str) -> Callable[[Builder], Builder]:
    """Register a builder of ops that act for a role."""
    return _register(ACTING, names)


def blocking(*names: str) -> Callable[[Builder], Builder]:
    """Register a builder of ops that may wait."""
    return _register(BLOCKING, names)


def flow(*names: str) -> Callable[[Builder], Builder]:
    """Register a builder of ops that run regions."""
    return _register(FLOW, names)


def jump(*names: str) -> Callable[[Builder], Builder]:
    """Register a builder of branches between the blocks of a region."""
    return _register(JUMP, names)


def end(*names: str) -> None:
    """Register terminators."""
    for name in names:
        TABLE[name] = (END, lambda op: lambda: None)
