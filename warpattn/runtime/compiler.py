"""The compiler's way from a launch to machine code; needs Triton and no GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from warpattn.errors import AttentionError
from warpattn.problem.arch import triton_target
from warpattn.problem.launch import Launch
from warpattn.runtime.kernel_cache import Artifact, require_triton
from warpattn.runtime.kernel_parameters import parameters

__all__ = ["artifact_of", "compiled", "refusals_named"]


def artifact_of(launch: Launch) -> Artifact:
    """The machine code of an NVIDIA kernel, with what its driver needs to launch it; always compiles."""
    kernel = compiled(launch)
    metadata = kernel.metadata
    taken = parameters(kernel.src.signature)
    return Artifact(bytes(kernel.asm["cubin"]), metadata.name, metadata.shared, metadata.num_warps * 32, taken)


def compiled(launch: Launch) -> Any:
    """Triton's CompiledKernel of a launch, with its intermediate code and metadata; always compiles."""
    require_triton()
    import triton

    with refusals_named(launch.name):
        return triton.compile(launch.source(), target=triton_target(launch.arch), options=dict(launch.options))


@contextlib.contextmanager
def refusals_named(name: str) -> Iterator[None]:
    """Turn what Triton refuses to compile into one AttentionError; Triton's own error, with its lines, is its cause."""
    from triton.errors import TritonError

    try:
        yield
    except TritonError as error:
        raise AttentionError(f"{name} cannot be compiled; Triton says: {_innermost(error)}") from error


def _innermost(error: BaseException) -> str:
    """Why, without the excerpts of every function on the way there: one line."""
    while error.__cause__ is not None or error.__context__ is not None:
        error = error.__cause__ or error.__context__ or error
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__
