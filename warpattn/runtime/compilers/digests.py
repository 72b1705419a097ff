"""Reads Triton's own files, whose digest is in the names of kernels, while the server goes on to import torch."""

from __future__ import annotations

from threading import Thread


def _read() -> None:
    try:
        from triton.runtime.cache import triton_key  # keeps what it has found
    except ImportError:  # another Triton, which `warm` refuses
        return
    triton_key()


reading = Thread(target=_read, name="digests")
reading.start()
