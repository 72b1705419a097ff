"""Compiled kernels in memory and on disk, so that a second process compiles nothing and does not even import Triton.

    find(key, build)    memory  ->  file  ->  build()  ->  file, memory

A file is named by a hash of everything that decides its content: the source text of `warpattn/kernels` and of its
imports, Triton's version, and the key (config, traced functions, flags). It is written under another name and then
renamed, so readers never see half a file; it starts with its name and a checksum, so a damaged or renamed one is
compiled again. The folder is $WARPATTN_CACHE_DIR, else $XDG_CACHE_HOME/warpattn, else ~/.cache/warpattn; if it cannot
be written, or others can write it, kernels are compiled once per process, and one line on standard error says so.
It may be deleted at any time; `cache_folder` keeps it below a limit and says which files are read.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from warpattn.errors import AttentionError
from warpattn.runtime import cache_folder
from warpattn.runtime.cache_folder import folder, mark_used, sweep
from warpattn.runtime.kernel_parameters import Parameter

FORMAT = "warpattn kernel 3"
IN_MEMORY = 512
PACKAGE = Path(__file__).parents[1]
# The kernels, the modules that they import except for error messages, the reader of their signatures, and the code
# that changes their PTX.
SOURCES = (
    "kernels", "language", "problem", "sequences", "quantized.py", "runtime/kernel_parameters.py", "runtime/shared_code"
)  # fmt: skip

# Environment variables that change the code Triton makes: kernels of other settings have other files.
SETTINGS = (
    "ALLOW_LHS_TMEM_LAYOUT_CONVERSION", "AMDGCN_ANALYZE_SMALL_TENSOR_RANGE", "AMDGCN_SCALARIZE_PACKED_FOPS",
    "AMDGCN_USE_BUFFER_ATOMICS", "AMDGCN_USE_BUFFER_OPS", "DISABLE_LLVM_OPT", "DISABLE_MMA_V3", "DISABLE_MMA_V5",
    "DISABLE_PTXAS_OPT", "LLVM_PASS_PLUGIN_PATH", "PTXAS_OPTIONS", "TRITON_DEFAULT_FP_FUSION", "TRITON_ENABLE_ASAN",
    "TRITON_F32_DEFAULT", "TRITON_FORCE_DISABLE_FP_FUSION", "TRITON_HIP_USE_ASYNC_COPY",
    "TRITON_HIP_USE_BLOCK_PINGPONG", "TRITON_HIP_USE_COEXEC_SCHEDULER", "TRITON_HIP_USE_EXPERT_SCHEDULING",
    "TRITON_HIP_USE_IN_THREAD_TRANSPOSE", "TRITON_INSTRUMENTATION_MODE", "TRITON_KERNEL_OVERRIDE",
    "TRITON_LIBDEVICE_PATH", "TRITON_MOCK_PTX_VERSION", "TRITON_OVERRIDE_ARCH", "TRITON_PLUGIN_PATHS",
    "TRITON_PTXAS_BLACKWELL_PATH", "TRITON_PTXAS_PATH", "TRITON_SWAP_MIR",
)  # fmt: skip


@dataclass(frozen=True)
class Artifact:
    """One compiled kernel: machine code, its entry, bytes of dynamic shared memory, threads of a block, parameters."""

    cubin: bytes
    entry: str
    shared: int
    threads: int
    parameters: tuple[Parameter, ...] = ()


_memory: dict[Hashable, Artifact] = {}
_building = threading.RLock()
_said: set[str] = set()  # sentences of `say_once`


def find(key: Hashable, build: Callable[[], Artifact]) -> Artifact:
    """Return the kernel of `key`, compiled by `build` if neither memory nor disk has it.

    `repr(key)` must identify it; the first part of the key is its name in messages, such as "sm90.prefill".
    """
    artifact = _memory.get(key)
    if artifact is None:
        path = path_of(key)
        artifact = load(path) or _built(key, path, build)
        if len(_memory) >= IN_MEMORY:
            _memory.clear()
        _memory[key] = artifact
    return artifact


def _built(key: Hashable, path: Path | None, build: Callable[[], Artifact]) -> Artifact:
    """Compile a kernel, one thread at a time, unless another thread has compiled it meanwhile."""
    with _building:
        artifact = _memory.get(key)
        if artifact is None:
            refusal = cache_folder.refusal(folder())
            announce(str(key[0] if isinstance(key, tuple) else key), None if refusal else folder())
            artifact = build()
            if refusal:
                say_once(f"compiled kernels are kept for this process only: {refusal}")
            elif store(path, artifact):
                sweep(folder(), version=version())
            _memory[key] = artifact
    return artifact


def forget() -> None:
    """Empty the memory; files stay."""
    _memory.clear()


def path_of(key: Hashable) -> Path | None:
    """Return the file of a kernel; None without a folder."""
    place = folder()
    settings = [f"{name}={os.environ[name]}" for name in SETTINGS if name in os.environ]
    name = hashlib.sha256("\n".join((_made_by(), *settings, repr(key))).encode()).hexdigest()
    return None if place is None else place / name[:2] / f"{version()}-{name[2:]}.kernel"


def _made_by() -> str:
    return "\n".join((FORMAT, _sources(), triton_version()))


def version() -> str:
    """Return the prefix of the file names of all kernels of this source and this Triton."""
    return hashlib.sha256(_made_by().encode()).hexdigest()[:8]


def load(path: Path | None) -> Artifact | None:
    """Read a kernel from a file; None if it is missing, unreadable, damaged, renamed, or may be another user's."""
    if path is None:
        return None
    try:
        header, _, cubin = cache_folder.read(path).partition(b"\n")
        told = json.loads(header)
        fields = {name: told[name] for name in ("name", "entry", "shared", "threads", "parameters")}
        if told["format"] != FORMAT or fields["name"] != path.name or told["sha256"] != _checksum(cubin, fields):
            return None
        taken = tuple(Parameter(**x) for x in told["parameters"])
        mark_used(path)
        return Artifact(cubin, told["entry"], told["shared"], told["threads"], taken)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def store(path: Path | None, artifact: Artifact) -> bool:
    """Write a kernel to its file in one step; False, with a line on standard error, if that fails."""
    if path is None:
        return False
    fields: dict[str, Any] = {"name": path.name, "entry": artifact.entry}
    fields |= {"shared": artifact.shared, "threads": artifact.threads}
    fields["parameters"] = [parameter.fields() for parameter in artifact.parameters]
    header = {"format": FORMAT, "sha256": _checksum(artifact.cubin, fields)} | fields
    temporary = None
    try:
        handle, temporary = cache_folder.new_file(path)
        with os.fdopen(handle, "wb") as file:
            file.write(json.dumps(header).encode() + b"\n" + artifact.cubin)
            file.flush()
            temporary.replace(path)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        say_once(f"a compiled kernel is kept for this process only: {error.strerror or error}")
        return False
    return True


def triton_version() -> str:
    """The version of the Triton that would be imported, read without importing it; "" when there is none."""
    module = sys.modules.get("triton")
    if module is not None:
        return str(getattr(module, "__version__", ""))
    return _installed_triton()


def require_triton() -> None:
    """Raise AttentionError unless Triton 3.9 is installed; compiling needs it, kernels found on disk do not."""
    found = triton_version()
    if not found.startswith("3.9."):
        has = f"Triton {found} is installed" if found else "Triton is not installed"
        needed = "Triton 3.9 compiles kernels (Python 3.11 and newer: pip install --no-deps triton==3.9.0)"
        raise AttentionError(f"{has}; {needed}; the reference needs none")


@cache
def _installed_triton() -> str:
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return ""
    found = re.search(r"^__version__ = ['\"]([^'\"]+)", Path(spec.origin).read_text(), re.MULTILINE)
    return found.group(1) if found else ""


def source_files() -> list[Path]:
    """Return the files whose text decides what kernels compile to."""
    named = [PACKAGE / name for name in SOURCES]
    return sorted(path for one in named for path in ([one] if one.is_file() else one.rglob("*.py")))


@cache
def _sources() -> str:
    """Digest of the source text that decides what kernels compile to."""
    digest = hashlib.sha256()
    for path in source_files():
        text = path.read_bytes()
        digest.update(f"{path.relative_to(PACKAGE).as_posix()} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def _checksum(cubin: bytes, fields: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode() + cubin).hexdigest()


def announce(name: str, place: Path | None) -> None:
    """Print that `name` is being compiled, unless standard error is no terminal or WARPATTN_PROGRESS is 0."""
    if not _wanted() or not sys.stderr.isatty():
        return
    kept = "for this process: it cannot be kept" if place is None else f"once: it is kept in {place}"
    print(f"warpattn: compiling {name}, {kept}", file=sys.stderr, flush=True)


def say_once(sentence: str) -> None:
    """Print a sentence about this machine once per process, also without a terminal; not with WARPATTN_PROGRESS=0."""
    if sentence not in _said and _wanted():
        print(f"warpattn: {sentence}", file=sys.stderr, flush=True)
    _said.add(sentence)


def _wanted() -> bool:
    return sys.stderr is not None and os.environ.get("WARPATTN_PROGRESS") != "0"
