"""What Triton compiles for latent attention on Blackwell."""

from collections.abc import Mapping
from typing import Any

from triton.experimental.gluon import GluonASTSource

from warpattn.language.nodes import Program
from warpattn.problem.element import Element

from ...nvidia.arguments import query_pointers
from ...pieces.signature import ALIGNED, captured_types, kernel_source, modifier_functions, packed_span
from ..signature import addressed_rows, copied_rows, map_type
from ..traits import LEAST_ROWS, Traits
from .config import LatentConfig
from .kernel import latent_kernel


def latent_source(
    args: Mapping[str, Any], config: LatentConfig, traits: Traits, mask: Program, score: Program | None
) -> GluonASTSource:
    """The kernel of a launch with `args`: rotary parts as keys, latents as values."""
    boxes = (config.rope, config.stored if config.narrow_rope else config.element), (config.half, config.stored)
    return row_source(latent_kernel, args, boxes, config, traits, (mask, score))


def row_source(
    kernel: Any, args: Mapping[str, Any], boxes: tuple[tuple[int, Element], tuple[int, Element]], config: Any,
    traits: Traits, programs: tuple[Program, Program | None],
) -> GluonASTSource:  # fmt: skip
    """A kernel whose rows are tokens and heads of a group; boxes: columns and elements of those of keys and values."""
    mask, score = programs
    given: dict[str, Any] = captured_types(mask, score, "sm100")
    if config.box_rows >= LEAST_ROWS:
        (k_columns, k), (v_columns, v) = boxes
        given["k_desc"] = map_type([1, config.box_rows, 1, k_columns], k, None, traits.kind != "dense")
        given["v_desc"] = map_type([1, config.box_rows, 1, v_columns], v, None, True)
    constants = {"config": config, "functions": modifier_functions(packed_span(mask), score), "traits": traits}
    hints = dict.fromkeys((*query_pointers(args["q"]), "out.pointer"), ALIGNED) | copied_rows(config.box_rows)
    hints |= addressed_rows(args["recompute_args"])
    return kernel_source(kernel, args, constants, given, hints)
