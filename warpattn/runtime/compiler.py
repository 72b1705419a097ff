"""The compiler's way from a launch to machine code; needs Triton and no GPU."""

from __future__ import annotations

from typing import Any

from warpattn.problem.arch import triton_target
from warpattn.problem.launch import Launch
from warpattn.runtime.kernel_cache import Artifact, require_triton
from warpattn.runtime.kernel_parameters import parameters

__all__ = ["artifact_of", "compiled"]


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

    return triton.compile(launch.source(), target=triton_target(launch.arch), options=dict(launch.options))
