"""What Triton compiles to make 8-bit values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triton.experimental.gluon import GluonASTSource

from warpattn.problem.arch import TARGETS

from ..pieces.signature import ALIGNED, kernel_source
from .config import QuantiseConfig
from .kernel import sizes_kernel, values_kernel

KERNELS = {"sizes": sizes_kernel, "values": values_kernel}


def quantise_source(name: str, args: Mapping[str, Any], config: QuantiseConfig, arch: str) -> GluonASTSource:
    """The kernel of a name for a launch with `args`, on an architecture."""
    constants = {"config": config, "lanes": TARGETS[arch].lanes}
    runs = {"x": config.run, "values": config.stored_run}
    vectors = [f"{name}.pointer" for name, run in runs.items() if run > 1 and name in args]
    vectors += ["across_ptr"] * config.transposed * (name == "values")
    return kernel_source(KERNELS[name], args, constants, hints=dict.fromkeys(vectors, ALIGNED))
