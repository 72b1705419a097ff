"""What Triton compiles for wide heads on Blackwell."""

from triton.experimental.gluon import GluonASTSource

from warpattn.language.nodes import Program

from ..mla.signature import row_source
from ..traits import Traits
from .config import BLOCK, WideConfig
from .kernel import wide_kernel


def wide_source(config: WideConfig, traits: Traits, mask: Program, score: Program | None) -> GluonASTSource:
    """The kernel with the types of its parameters and its constants."""
    return row_source(wide_kernel, (BLOCK, BLOCK), config, traits, (mask, score))
