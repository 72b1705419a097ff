"""What Triton compiles for latent attention on Blackwell."""

from typing import Any

from triton.experimental.gluon import GluonASTSource

from warpattn.language.nodes import Program
from warpattn.problem.element import FP32

from ...nvidia.combine_args import StridedArgs
from ...pieces.signature import modifier_functions, packed_span
from ..sequence_args import Lengths, sequence_types
from ..signature import ALIGNED, descriptor, modifier_types
from ..traits import LEAST_ROWS, Traits
from .config import LatentConfig
from .kernel import latent_kernel


def latent_source(config: LatentConfig, traits: Traits, mask: Program, score: Program | None) -> GluonASTSource:
    """The kernel with the types of its parameters and its constants: rotary parts as keys, latents as values."""
    return row_source(latent_kernel, (config.rope, config.half), config, traits, (mask, score))


def row_source(
    kernel: Any, columns: tuple[int, int], config: Any, traits: Traits, programs: tuple[Program, Program | None]
) -> GluonASTSource:
    """A kernel whose rows are tokens and heads of a group, and whose boxes of keys and values have so many columns."""
    (k_columns, v_columns), (mask, score) = columns, programs
    copied = config.box_rows < LEAST_ROWS

    def keys(columns: int, clipped: bool) -> str:
        box = [1, config.box_rows, 1, columns]
        return config.element.pointer if copied else descriptor(box, config.element, None, clipped)

    out = FP32 if config.splitk_partitions > 1 else config.element
    signature = {
        "q": StridedArgs(config.element.pointer),
        "k_desc": keys(k_columns, traits.kind != "dense"),
        "v_desc": keys(v_columns, True),
        "out": StridedArgs(out.pointer),
        "lse": StridedArgs("*fp32"),
        "sinks_ptr": "*fp32",
        "scale": "fp32",
        "shape": Lengths(),
        "sequence_args": sequence_types(traits.kind, copied),
        **modifier_types(mask, score),
    }
    constants = {"config": config, "functions": modifier_functions(packed_span(mask), score), "traits": traits}
    hints = {(0, 0): ALIGNED, (3, 0): ALIGNED} | ({(1,): ALIGNED, (2,): ALIGNED} if copied else {})
    return GluonASTSource(kernel, signature, constants, hints)
