"""What a peer's adapter is: a name, a reason when it cannot run here, and a way to make one call of a case."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

import torch

from bench.cases import Case

Call = Callable[[], torch.Tensor]


class Unsupported(Exception):
    """The peer has no kernel for this case; the message is the reason, in one line."""


class Peer(Protocol):
    """One implementation of attention that can be timed."""

    name: str

    def available(self) -> str | None:
        """None when it can run on this machine, else the reason in one line."""
        ...

    def version(self) -> str:
        """The version to write into the record; only read when available."""
        ...

    def prepare(self, case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
        """A call without arguments that returns out (B, Sq, Hq, Dv); planning and descriptors are made here.

        q, k, v are contiguous (B, S, H, D) tensors on the device that runs. Raises Unsupported.
        """
        ...


def first_line(error: BaseException) -> str:
    """`TypeOfError: first line of its message`, short enough for a table."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:200]


def no_gpu() -> str | None:
    """Why a CUDA peer cannot run here, or None."""
    return None if torch.cuda.is_available() else "torch sees no CUDA GPU"


def cannot_import(module: str) -> str | None:
    """None when `module` imports, else the first line of what it raised (also when its own libraries are broken)."""
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"cannot import {module}: {first_line(error)}"
    return None


def version_of(*distributions: str) -> str:
    """`name version` of every distribution of the list, joined."""
    return ", ".join(f"{name} {installed_version(name) or '(no version recorded)'}" for name in distributions)


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def unmodified(case: Case, *, softcap: bool = False) -> None:
    """Raises Unsupported for documents in a sequence, and for a soft-cap unless the peer takes one."""
    if case.documents > 1:
        raise Unsupported("its call for dense batches has no documents")
    if case.softcap and not softcap:
        raise Unsupported("it has no soft-cap")


def top_left_causal(case: Case) -> None:
    """Raises Unsupported where torch's top-left causal mask would not be the case's bottom-right one."""
    if case.causal and case.seq_q != case.seq_k:
        raise Unsupported("its causal mask is top-left aligned, the case is bottom-right with unequal lengths")
