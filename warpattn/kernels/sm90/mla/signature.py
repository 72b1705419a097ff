"""What Triton compiles for latent attention on Hopper."""

from collections.abc import Mapping
from typing import Any

from triton.experimental.gluon import GluonASTSource

from warpattn.problem.operands import Features

from ..decode.arguments import MappedLatents
from ..decode.signature import rows_map, stream_source
from .config import MlaConfig
from .kernel import mla_kernel


def mla_source(args: Mapping[str, Any], config: MlaConfig, features: Features) -> GluonASTSource:
    """The kernel's source for a launch with `args`; its keys are rotary parts, its values latents."""
    maps = {
        "k.desc": rows_map(config, config.rope, (config.latents if config.narrow_rope else None) or config.stored),
        "v.desc": rows_map(config, config.half, config.latents or config.stored),
    }
    again = ("k.latents.pointer", "k.rope.pointer") if isinstance(args["k"], MappedLatents) else ()
    return stream_source(mla_kernel, args, config, features, maps, again)
