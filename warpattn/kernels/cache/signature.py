"""What Triton compiles to append new keys and values to a cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triton.experimental.gluon import GluonASTSource

from warpattn.problem.arch import TARGETS

from ..pieces.signature import ALIGNED, kernel_source
from .config import AppendConfig, TableArgs
from .kernel import append_kernel

TENSORS = ("k_pages", "v_pages", "k_new", "v_new")


def append_source(args: Mapping[str, Any], config: AppendConfig, arch: str) -> GluonASTSource:
    """The kernel for a launch with `args`, on an architecture."""
    by_table = isinstance(args["places"], TableArgs)
    constants = {"config": config, "by_table": by_table, "lanes": TARGETS[arch].lanes}
    constants["trigger_dependents"] = arch == "sm90"
    vectors = [f"{name}.pointer" for name in TENSORS if config.run > 1]
    return kernel_source(append_kernel, args, constants, hints=dict.fromkeys(vectors, ALIGNED))
