"""Work that each compiling process would otherwise repeat before its first kernel: reading Triton's files and our
sources, whose digests are in the names of kernels. The server imports this module, and forks no process before that is
done."""

from __future__ import annotations

from warpattn.runtime import kernel_cache
from warpattn.runtime.compilers.digests import reading

reading.join()
kernel_cache.version()
