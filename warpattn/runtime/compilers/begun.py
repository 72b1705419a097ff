"""What a process that compiles would otherwise do before its first kernel, once a process: read Triton's own files and
our sources, whose digests are in the names of kernels, and import what changes PTX. Its server imports this module, and
goes on without it where another Triton is installed, which `warm` refuses."""

from __future__ import annotations

import networkx  # noqa: F401  # of shared_code
from triton.runtime.cache import triton_key

from warpattn.runtime import kernel_cache

triton_key()
kernel_cache.version()
