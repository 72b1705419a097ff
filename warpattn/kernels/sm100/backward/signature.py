"""What Triton compiles for the main kernel of the Blackwell backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triton.experimental.gluon import GluonASTSource

from ...nvidia.backward.arguments import BackwardPrograms
from ...nvidia.backward.signature import backward_source
from .config import BackwardConfig
from .kernel import start_roles


def main_source(args: Mapping[str, Any], config: BackwardConfig, programs: BackwardPrograms) -> GluonASTSource:
    """The main kernel of a launch with `args`."""
    return backward_source(args, config, programs, "sm100", start_roles)
