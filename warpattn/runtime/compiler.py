"""The compiler's way from a launch to machine code; needs Triton and no GPU.

Triton writes what it compiles into a folder of its own. Where it may not, or the disk is full, or something there
cannot be read, it gets a private temporary one, which leaves with this process.
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
from warpattn.runtime.cache_folder import private_temporary
from warpattn.runtime.kernel_cache import Artifact, require_triton, say_once, version
from warpattn.runtime.kernel_parameters import SCRATCH, parameters
from warpattn.runtime.shared_code import share_loops

_one_at_a_time = threading.RLock()
_private: list[Path] = []  # the temporary folder, once one is needed


def artifact_of(launch: Launch, target: str | None = None) -> Artifact:
    """The machine code of a kernel, with what its driver needs to launch it; always compiles. target: a name of
    `TARGETS` if it is not the launch's architecture."""
    kernel = compiled(launch, target)
    metadata = kernel.metadata
    taken = parameters(kernel.src.signature)
    if launch.arch in hip.ARCHS:
        hip.check_layout([*(parameter.kind for parameter in taken), *SCRATCH], kernel.asm["amdgcn"], launch.name)
    code = kernel.asm["hsaco" if launch.arch in hip.ARCHS else "cubin"]
    threads = metadata.num_warps * TARGETS[target or launch.arch].lanes
    return Artifact(bytes(code), metadata.name, metadata.shared, threads, taken)


def compiled(launch: Launch, target: str | None = None) -> Any:
    """Triton's CompiledKernel of a launch, with its intermediate code and metadata; always compiles."""
    require_triton()
    import triton

    chip = triton_target(target or launch.arch)

    def compile_it() -> Any:
        return triton.compile(launch.source(), target=chip, options=dict(launch.options))

    with refusals_named(launch.name), pipeline_of(launch):
        try:
            kernel = _somewhere(compile_it)
        except OSError as error:
            raise AttentionError(f"{launch.name} cannot be compiled: {error}") from error
        check_memory(launch, kernel.metadata.shared)
        return kernel


def check_memory(launch: Launch, shared: int) -> None:
    """Raise AttentionError if a block of the launch's chip has less shared memory than the kernel needs, in bytes."""
    most = ARCHS[launch.arch].smem
    if shared > most:
        text = f"{launch.name} needs {shared:,} bytes of shared memory; a block of {launch.arch} has {most:,} at most"
        raise AttentionError(text)


@contextlib.contextmanager
def pipeline_of(launch: Launch) -> Iterator[None]:
    """Triton's stages for a launch, in Triton's own folder under a name of this source's version: Triton's names see
    the text of functions, but not what the host works out for a kernel's constants. With `shared_code` the PTX has one
    copy of equal loops before it is assembled.

    Triton has one hook for all threads, and a hook of the user's is called as before."""
    from triton import knobs

    runtime: Any = knobs.runtime
    with _one_at_a_time:
        others = runtime.add_stages_inspection_hook
        runtime.add_stages_inspection_hook = stages_of_version(others, launch.shared_code)
        try:
            yield
        finally:
            runtime.add_stages_inspection_hook = others


def stages_of_version(others: Callable[..., Any] | None, shared_code: bool) -> Callable[..., Any]:
    """A hook for the stages of kernels that this thread compiles, beside that of `others`."""
    thread, named = threading.get_ident(), version() + "one copy" * shared_code

    def stages_of(backend: Any = None, stages: Any = None, *given: Any) -> Any:
        ours = threading.get_ident() == thread
        if stages is None:  # how kernels of this pipeline are told from others in Triton's folder
            key, digest = others() if others else ("", "")
            return key + named * ours, digest
        if others:
            others(backend, stages, *given)
        if ours and shared_code:
            make_ptx = stages["ptx"]
            stages["ptx"] = lambda *source: share_loops(make_ptx(*source))
        return None

    return stages_of


def _somewhere(compile_it: Callable[[], Any]) -> Any:
    """What `compile_it` returns, in Triton's own folder or a private one."""
    why = folder_refusal(triton_folder())
    if not why and not _private:
        try:
            return compile_it()
        except (OSError, ValueError, KeyError) as error:  # a full disk, or what Triton kept there is damaged
            why = f"{type(error).__name__}: {error}"
    with _private_folder(why):
        return compile_it()


def triton_folder() -> Path | None:
    """Where Triton writes while it compiles; None without a home folder."""
    given, home = os.environ.get("TRITON_CACHE_DIR"), os.environ.get("TRITON_HOME")
    if given:
        return Path(given)
    try:
        return (Path(home) if home else Path.home()) / ".triton" / "cache"
    except RuntimeError:
        return None


def folder_refusal(place: Path | None) -> str:
    """Why Triton's own folder is not used: it cannot be written, or every user can; empty if it is used."""
    if place is None:
        return "there is no home folder"
    there = next(path for path in (place, *place.absolute().parents) if os.path.lexists(path))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
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
    """Turn what Triton refuses to compile into one AttentionError; Triton's own error, with its lines, is its cause.

    A pass of MLIR that fails is a RuntimeError, and so is a program that is nested too deeply for Python's parser."""
    from triton.errors import TritonError

    try:
        yield
    except (TritonError, RuntimeError) as error:
        raise AttentionError(f"{name} cannot be compiled; Triton says: {_innermost(error)}") from error


def _innermost(error: BaseException) -> str:
    """Why, in one line, without the excerpts of all functions of the call stack."""
    while error.__cause__ is not None or error.__context__ is not None:
        error = error.__cause__ or error.__context__ or error
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__
