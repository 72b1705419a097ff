"""The launches of a backward call on Blackwell."""

from __future__ import annotations

from typing import Any

from warpattn.problem.arch import ARCHS
from warpattn.problem.backward import CheckedBackward, Gradients
from warpattn.problem.launch import Choice, Launch
from warpattn.sequences import Dense, Sequence

from ...nvidia.backward.launch import MainKernel, backward_launches
from .config import choose

DENSE = Dense()


def _main_source(*of: Any) -> Any:
    from .signature import main_source  # imports Triton

    return main_source(*of)


MAIN = MainKernel("sm100", _main_source)


def list_backward_launches(
    checked: CheckedBackward, x: Gradients, sequence: Sequence = DENSE, choice: Choice | None = None
) -> tuple[Launch, ...]:
    """The launches of a dense or ragged backward call, with the planner's choice or a given one; see
    `backward_launches`."""
    choice = choose(checked.forward.problem, ARCHS["sm100"], checked.deterministic) if choice is None else choice
    return backward_launches(checked, x, sequence, choice, MAIN)
