"""What Triton compiles for one config, mask and score of latent attention on Hopper."""

from warpattn.language.nodes import Program

from ..decode.arguments import ColumnScaledRows
from ..decode.signature import stream_source
from ..layouts import element_type, tile_layout
from ..signature import Features
from .config import MlaConfig
from .kernel import mla_kernel


def mla_source(config: MlaConfig, mask: Program, score: Program | None, has_sinks: bool, has_lse: bool):
    """The kernel with the types of its parameters and its constants: rotary parts as keys, latents as values."""
    features, rows = Features(mask, score, has_sinks, has_lse), None
    if config.latents is not None:
        layout = tile_layout(config.box, config.half, element_type(config.latents))
        descriptor = f"tensordesc<{config.latents.name}[1, {config.box}, 1, {config.half}],{layout!r}>"
        rows = ColumnScaledRows(descriptor, "*fp32", *["i64"] * 4)
    return stream_source(mla_kernel, config, config.rope, config.half, features, rows)
