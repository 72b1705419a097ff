"""What a process that compiles would otherwise do before its first kernel, once a process: read Triton's own files and
our sources, whose digests are in the names of kernels, and import what changes PTX. Its server imports this module."""

from __future__ import annotations

import networkx  # noqa: F401  # of shared_code
import triton.runtime.cache

from warpattn.runtime import kernel_cache

triton.runtime.cache.triton_key()
kernel_cache.version()
