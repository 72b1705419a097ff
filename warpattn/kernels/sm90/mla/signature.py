"""What Triton compiles for one config, mask and score of latent attention on Hopper."""

from warpattn.language.nodes import Program

from ..decode.signature import stream_source
from ..signature import Features
from .config import MlaConfig
from .kernel import mla_kernel


def mla_source(config: MlaConfig, mask: Program, score: Program | None, has_sinks: bool, has_lse: bool):
    """The kernel with the types of its parameters and its constants: rotary parts as keys, latents as values."""
    return stream_source(mla_kernel, config, config.rope, config.half, Features(mask, score, has_sinks, has_lse))
