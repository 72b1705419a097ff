"""What a process that compiles would otherwise do before its first kernel, once a process: read Triton's own files and
our sources, whose digests are in the names of kernels, and import what changes PTX. Its server imports this module, and
forks no process before all of it is done."""

from __future__ import annotations

import networkx  # noqa: F401  # of shared_code

from warpattn.runtime import kernel_cache
from warpattn.runtime.compilers.digests import reading

reading.join()
kernel_cache.version()
