"""What a Hopper kernel reads and writes, as one value of its configuration. Nothing in this file imports Triton."""

from __future__ import annotations

from dataclasses import dataclass

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
    """A configuration whose operands are read by their names."""

    operands: OperandFormat

    @property
    def element(self) -> Element:
        return self.operands.element

    @property
    def dim_qk(self) -> int:
        return self.operands.dim_qk

    @property
    def dim_v(self) -> int:
        return self.operands.dim_v

    @property
    def eight_bit(self) -> EightBit | None:
        return self.operands.eight_bit
