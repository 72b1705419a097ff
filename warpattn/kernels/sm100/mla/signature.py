"""What Triton compiles for latent attention on Blackwell."""

from collections.abc import Mapping
from typing import Any

from triton.experimental.gluon import GluonASTSource

from warpattn.language.nodes import Program

from ...pieces.signature import ALIGNED, captured_types, kernel_source, modifier_functions, packed_span
from ..signature import copied_rows, map_type
from ..traits import LEAST_ROWS, Traits
from .config import LatentConfig
from .kernel import latent_kernel


def latent_source(
    args: Mapping[str, Any], config: LatentConfig, traits: Traits, mask: Program, score: Program | None
) -> GluonASTSource:
    """The kernel of a launch with `args`: rotary parts as keys, latents as values."""
    return row_source(latent_kernel, args, (config.rope, config.half), config, traits, (mask, score))


def row_source(
    kernel: Any, args: Mapping[str, Any], columns: tuple[int, int], config: Any, traits: Traits,
    programs: tuple[Program, Program | None],
) -> GluonASTSource:  # fmt: skip
    """A kernel whose rows are tokens and heads of a group, and whose boxes of keys and values have so many columns."""
    mask, score = programs
    given: dict[str, Any] = captured_types(mask, score, "sm100")
    if config.box_rows >= LEAST_ROWS:
        k_box, v_box = ([1, config.box_rows, 1, n] for n in columns)
        given["k_desc"] = map_type(k_box, config.element, None, traits.kind != "dense")
        given["v_desc"] = map_type(v_box, config.element, None, True)
    constants = {"config": config, "functions": modifier_functions(packed_span(mask), score), "traits": traits}
    hints = dict.fromkeys(("q.pointer", "out.pointer"), ALIGNED) | copied_rows(config.box_rows)
    return kernel_source(kernel, args, constants, given, hints)
