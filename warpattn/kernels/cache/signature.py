"""What Triton compiles to append new keys and values to a cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triton.experimental.gluon import GluonASTSource

from warpattn.problem.arch import TARGETS

from ..pieces.signature import ALIGNED, kernel_source
from .config import AppendConfig
from .kernel import append_kernel, append_slots_kernel

KERNELS = {"append": append_kernel, "append_slots": append_slots_kernel}
TENSORS = ("k_pages", "v_pages", "k_new", "v_new")


def append_source(name: str, args: Mapping[str, Any], config: AppendConfig, arch: str) -> GluonASTSource:
    """The kernel of a name for a launch with `args`, on an architecture."""
    constants = {"config": config, "lanes": TARGETS[arch].lanes, "trigger_dependents": arch == "sm90"}
    vectors = [f"{name}.pointer" for name in TENSORS if config.run > 1]
    return kernel_source(KERNELS[name], args, constants, hints=dict.fromkeys(vectors, ALIGNED))
