"""What Triton compiles for the main kernel of the Blackwell backward."""

from __future__ import annotations

from triton.experimental.gluon import GluonASTSource

from warpattn.language.nodes import Program

from ...nvidia.backward.signature import backward_source
from .config import BackwardConfig
from .kernel import start_roles


def main_source(config: BackwardConfig, mask: Program, score: Program | None, slope: Program | None) -> GluonASTSource:
    """The main kernel for a mask, a score and the score's derivative (None: 1)."""
    return backward_source(config, (mask, score, slope), "sm100", start_roles)
