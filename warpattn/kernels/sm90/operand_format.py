"""What a Hopper kernel reads and writes, as one value of its configuration. Nothing in this file imports Triton."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from warpattn.problem.element import Element
from warpattn.problem.scales import EightBit


@dataclass(frozen=True)
class OperandFormat:
    """Dtypes and head dims."""

    element: Element  # of products; and of out, unless that is another
    dim_qk: int
    dim_v: int
    eight_bit: EightBit | None = None  # of keys and values in memory
    out_element: Element | None = None
    first_value: int = 0  # column of values and output that its `dim_v` begin with, see `value_blocks`


class WithOperands:
    """A configuration whose operands are read by their names, as often as other fields: by attrgetter, without a call
    of a function."""

    operands: OperandFormat

    if TYPE_CHECKING:
        element: Element
        dim_qk: int
        dim_v: int
        eight_bit: EightBit | None
    else:
        element = property(attrgetter("operands.element"))
        dim_qk = property(attrgetter("operands.dim_qk"))
        dim_v = property(attrgetter("operands.dim_v"))
        eight_bit = property(attrgetter("operands.eight_bit"))
