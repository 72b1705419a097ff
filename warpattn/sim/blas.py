"""Runs NumPy's matrix products on one thread: for small tiles a pool of threads costs a hundred times what it saves."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np


@cache
def _pool() -> tuple[Any, Any] | None:
    """Return (get, set) of the thread count of OpenBLAS in NumPy's wheels; None with another BLAS."""
    for path in (Path(np.__file__).parent.parent / "numpy.libs").glob("libscipy_openblas*"):
        library = ctypes.CDLL(str(path))
        for suffix in ("64_", ""):
            get = getattr(library, f"scipy_openblas_get_num_threads{suffix}", None)
            put = getattr(library, f"scipy_openblas_set_num_threads{suffix}", None)
            if get and put:
                return get, put
    return None


@contextmanager
def one_thread() -> Iterator[None]:
    """Run matrix products inside on the calling thread."""
    pool = _pool()
    if pool is None:
        yield
        return
    before = pool[0]()
    pool[1](1)
    try:
        yield
    finally:
        pool[1](before)
