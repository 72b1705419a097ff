"""Whether the scores of a call may be too large for the plain softmax of Hopper's kernels.

They multiply a score by c = scale * log2(e) before its row's maximum is taken away. Where c is above 1, that is no fp32
number for the largest scores; they get the softmax that score functions have (exact_softmax.py).
"""

from __future__ import annotations

from warpattn.language.nodes import Program
from warpattn.problem import CheckedCall, operands
from warpattn.problem.rules import LARGEST_SCALE, largest_exponent

AS_THEY_ARE = Program((), ())  # a score program without an output: products are scores, times c


def programs(checked: CheckedCall) -> tuple[Program, Program | None]:
    """The mask's and the score's programs as the forward kernels take them."""
    mask, score = operands.programs(checked)
    problem = checked.problem
    exponent = largest_exponent(checked.scale, problem.dim_qk, None if problem.kv_dtype else problem.dtype)
    return mask, AS_THEY_ARE if score is None and exponent > LARGEST_SCALE else score
