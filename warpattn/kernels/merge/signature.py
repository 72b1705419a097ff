"""What Triton compiles to merge states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triton.experimental.gluon import GluonASTSource

from warpattn.problem.arch import TARGETS

from ..pieces.signature import ALIGNED, kernel_source
from .config import MergeConfig
from .kernel import merge_kernel


def merge_source(args: Mapping[str, Any], config: MergeConfig, arch: str) -> GluonASTSource:
    """The kernel of a launch with `args`, on an architecture."""
    constants = {"config": config, "lanes": TARGETS[arch].lanes}
    outputs = [f"{state}.out.pointer" for state in ("merged", *(f"states.{i}" for i in range(config.states)))]
    return kernel_source(merge_kernel, args, constants, hints=dict.fromkeys(outputs if config.run > 1 else (), ALIGNED))
