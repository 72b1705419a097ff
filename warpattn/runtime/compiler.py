"""Compiles launches to machine code; needs Triton and no GPU.

Triton writes what it compiles into its own cache folder. If it may not, the disk is full, or something there cannot be
read, it gets a private temporary folder, which is removed when this process ends.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from warpattn.errors import AttentionError
from warpattn.problem.arch import ARCHS, TARGETS, triton_target
from warpattn.problem.launch import Launch
from warpattn.runtime import hip
from warpattn.runtime.cache_folder import is_folder, private_temporary
from warpattn.runtime.kernel_cache import Artifact, require_triton, say_once, version
from warpattn.runtime.kernel_parameters import SCRATCH, parameters
from warpattn.runtime.shared_code import NotShared, share_role

_one_at_a_time = threading.RLock()
_private: list[Path] = []  # the temporary folder, once one is needed


def artifact_of(launch: Launch, target: str | None = None) -> Artifact:
    """Compile a launch's kernel; return its machine code with all that the driver needs to launch it. target: a name in
    `TARGETS`, if that is not the launch's architecture."""
    kernel = compiled(launch, target)
    metadata = kernel.metadata
    taken = parameters(kernel.src.signature)
    if launch.arch in hip.ARCHS:
        hip.check_layout([*(parameter.kind for parameter in taken), *SCRATCH], kernel.asm["amdgcn"], launch.name)
    code = kernel.asm["hsaco" if launch.arch in hip.ARCHS else "cubin"]
    threads = metadata.num_warps * TARGETS[target or launch.arch].lanes
    return Artifact(bytes(code), metadata.name, metadata.shared, threads, taken)


def compiled(launch: Launch, target: str | None = None) -> Any:
    """Compile a launch's kernel; return Triton's CompiledKernel with its intermediate code and metadata."""
    require_triton()
    import triton

    chip = triton_target(target or launch.arch)

    def compile_it() -> Any:
        if launch.shared_code:
            with contextlib.suppress(NotShared):
                return triton.compile(launch.source(True), target=chip, options=dict(launch.options))
        return triton.compile(launch.source(), target=chip, options=dict(launch.options))

    with refusals_named(launch.name), our_pipeline():
        try:
            kernel = _somewhere(compile_it)
        except OSError as error:
            raise AttentionError(f"{launch.name} cannot be compiled: {error}") from error
        check_memory(launch, kernel.metadata.shared)
        return kernel


def check_memory(launch: Launch, shared: int) -> None:
    """Raise AttentionError if the kernel needs more than the bytes of shared memory that a block of its chip has."""
    most = ARCHS[launch.arch].smem
    if shared > most:
        text = f"{launch.name} needs {shared:,} bytes of shared memory; a block of {launch.arch} has {most:,} at most"
        raise AttentionError(text)


@contextlib.contextmanager
def our_pipeline() -> Iterator[None]:
    """Hook into Triton's stages. It adds the version of this source to the names in Triton's own cache, which depend on
    the text of device functions but not on the host code that computes a kernel's constants. And it leads warps into
    code that roles share (`shared_code`) in the PTX before that is assembled.

    Triton has one hook for all threads; a hook that the user has set is called as before."""
    from triton import knobs

    runtime: Any = knobs.runtime
    with _one_at_a_time:
        others = runtime.add_stages_inspection_hook
        runtime.add_stages_inspection_hook = stages_of_version(others)
        try:
            yield
        finally:
            runtime.add_stages_inspection_hook = others


def stages_of_version(others: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return a hook for the stages of kernels that this thread compiles; it also calls the hook `others`."""
    thread, named = threading.get_ident(), version()

    def stages_of(backend: Any = None, stages: Any = None, *given: Any) -> Any:
        ours = threading.get_ident() == thread
        if stages is None:  # Triton asks for the part of its cache key that names this pipeline
            key, digest = others() if others else ("", "")
            return key + named * ours, digest
        if others:
            others(backend, stages, *given)
        if ours and "ptx" in stages:
            make_ptx = stages["ptx"]
            stages["ptx"] = lambda *source: share_role(make_ptx(*source))
        return None

    return stages_of


def _somewhere(compile_it: Callable[[], Any]) -> Any:
    """Call `compile_it` with Triton's own folder or a private one; return its result."""
    why = folder_refusal(triton_folder())
    if not why and not _private:
        try:
            return compile_it()
        except (OSError, ValueError, KeyError) as error:  # a full disk, or damaged files of Triton's
            why = f"{type(error).__name__}: {error}"
    with _private_folder(why):
        return compile_it()


def triton_folder() -> Path | None:
    """Return the folder where Triton writes while it compiles; None without a home folder."""
    given, home = os.environ.get("TRITON_CACHE_DIR"), os.environ.get("TRITON_HOME")
    if given:
        return Path(given)
    try:
        return (Path(home) if home else Path.home()) / ".triton" / "cache"
    except RuntimeError:
        return None


def folder_refusal(place: Path | None) -> str:
    """Say why Triton's own folder is not used: it cannot be written, or all users can; empty if it is used."""
    if place is None:
        return "there is no home folder"
    there = next(path for path in (place, *place.absolute().parents) if os.path.lexists(path))
    if not is_folder(there) or not os.access(there, os.W_OK | os.X_OK):
        return f"{place} cannot be written"
    if there == place and there.stat().st_mode & stat.S_IWOTH:
        return f"every user may write in {place}"
    return ""


@contextlib.contextmanager
def _private_folder(why: str) -> Iterator[None]:
    """Let Triton write into a temporary folder of this process."""
    from triton import knobs

    with _one_at_a_time:
        if not _private:
            _private.append(private_temporary())
            atexit.register(shutil.rmtree, _private[0], ignore_errors=True)
            say_once(f"Triton compiles in a temporary folder of this process, not in its own: {why}")
        with knobs.cache.scope():
            knobs.cache.dir = str(_private[0])
            yield


@contextlib.contextmanager
def refusals_named(name: str) -> Iterator[None]:
    """Turn Triton's refusal to compile into one AttentionError, whose cause is Triton's own error with its lines.

    A failed MLIR pass is a RuntimeError, and so is a program that is nested too deeply for Python's parser."""
    from triton.errors import TritonError

    try:
        yield
    except (TritonError, RuntimeError) as error:
        raise AttentionError(f"{name} cannot be compiled; Triton says: {_innermost(error)}") from error


def _innermost(error: BaseException) -> str:
    """Return the innermost error's last line, without the excerpts of all functions of the call stack."""
    while error.__cause__ is not None or error.__context__ is not None:
        error = error.__cause__ or error.__context__ or error
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__
