"""What Triton compiles for the kernels of the Hopper backward that multiply."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triton.experimental.gluon import GluonASTSource

from ...nvidia.backward import signature as shared
from ...nvidia.backward.arguments import BackwardPrograms, CapturedPrograms
from .captured import PRODUCTS
from .config import BackwardConfig
from .kernel import start_roles


def main_source(args: Mapping[str, Any], config: BackwardConfig, programs: BackwardPrograms) -> GluonASTSource:
    """The main kernel of a launch with `args`."""
    return shared.backward_source(args, config, programs, "sm90", start_roles)


def captured_source(
    args: Mapping[str, Any], config: BackwardConfig, programs: CapturedPrograms, has_dlse: bool
) -> GluonASTSource:
    """The kernel for gradients of what a score captured of a launch with `args`."""
    return shared.captured_source(args, config, programs, has_dlse, "sm90", PRODUCTS)
