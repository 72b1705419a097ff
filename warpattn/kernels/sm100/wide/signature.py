"""What Triton compiles for wide heads on Blackwell."""

from collections.abc import Mapping
from typing import Any

from triton.experimental.gluon import GluonASTSource

from warpattn.language.nodes import Program

from ..mla.signature import row_source
from ..traits import Traits
from .config import BLOCK, WideConfig
from .kernel import wide_kernel


def wide_source(
    args: Mapping[str, Any], config: WideConfig, traits: Traits, mask: Program, score: Program | None
) -> GluonASTSource:
    """The kernel of a launch with `args`."""
    box = BLOCK, config.stored
    return row_source(wide_kernel, args, (box, box), config, traits, (mask, score))
