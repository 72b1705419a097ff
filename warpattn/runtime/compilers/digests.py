"""Reads Triton's own files, whose digest is in the names of kernels, while the server goes on to import torch.

The thread imports nothing new: two threads that import Triton at once wait for each other, and Python then lets one of
them fail.
"""

from __future__ import annotations

from threading import Thread

try:
    import triton.compiler
    import triton.experimental.gluon  # noqa: F401
    from triton.runtime.cache import triton_key  # caches its result
except ImportError:  # another Triton, which `warm` refuses
    triton_key = None

reading = Thread(target=triton_key, name="digests")
reading.start()
