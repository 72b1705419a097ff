"""Each kernel is compiled to TTGIR once for all tests and all workers of a session.

Compiling is most of what the simulator's tests cost (a second for a Blackwell kernel), and files share kernels. So
`keep_kernels` puts a store before `to_ttgir` of the simulator: memory, then a folder of the session that the workers
of pytest-xdist share, then the compiler. A kernel's file is named as Triton names its own: by the source text of the
kernel and of what it calls, types, constants, options and target.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any

import pytest

from warpattn.runtime.kernel_cache import triton_version

FOLDER = "WARPATTN_TEST_KERNELS"  # in the environment, which workers inherit
TREES: dict[str, Any] = {}  # syntax trees by source text


def keep_kernels(config: pytest.Config) -> None:
    """Compile through the session's store from now on; the session that made its folder removes it."""
    from warpattn.sim import compile as compiler

    if FOLDER not in os.environ:
        folder = tempfile.mkdtemp(prefix="warpattn-kernels-")
        os.environ[FOLDER] = folder
        config.add_cleanup(lambda: (os.environ.pop(FOLDER), shutil.rmtree(folder, ignore_errors=True)))
    compiler.to_ttgir = stored(compiler.to_ttgir, compiler.Compiled, Path(os.environ[FOLDER]))
    if triton_version().startswith("3.9."):
        parse_once()


def parse_once() -> None:
    """Keep the syntax trees of device functions, which Triton parses again for each kernel that calls them."""
    from triton.runtime.jit import JITCallable

    parse: Any = JITCallable.parse

    def kept(function: Any) -> Any:
        text = function._src
        if text not in TREES:
            TREES[text] = parse(function)
        return TREES[text]

    JITCallable.parse = kept


def stored(compile_kernel: Any, kind: Any, folder: Path) -> Any:
    """`compile_kernel(source, target, options)`, looked up in `folder` first; `kind(name, asm)` is what it returns."""

    @lru_cache(64)
    def find(name: str, path: Path) -> Any:
        return kind(name, {"ttgir": path.read_text()})

    @wraps(compile_kernel)
    def to_ttgir(source: Any, target: Any, options: dict[str, Any]) -> Any:
        path = folder / f"{name_of(source, target, options)}.ttgir"
        if not path.exists():
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_text(compile_kernel(source, target, options).asm["ttgir"])
            partial.replace(path)
        return find(source.name, path)

    return to_ttgir


def name_of(source: Any, target: Any, options: dict[str, Any]) -> str:
    """What decides a kernel's TTGIR, as one hash."""
    constants = {key: spelled(value) for key, value in source.constants.items()}
    facts = (source.fn.cache_key, source.signature, constants, source.attrs, target, sorted(options.items()))
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def spelled(constant: Any) -> Any:
    """A constant with functions replaced by what identifies their source text."""
    if isinstance(constant, (tuple, list)):
        return [spelled(x) for x in constant]
    return getattr(constant, "cache_key", None) or repr(constant)
