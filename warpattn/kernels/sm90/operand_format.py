"""Dtypes and head dims of a Hopper kernel, as one field of its configuration. This file imports no Triton."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from warpattn.problem.element import Element
from warpattn.problem.scales import EightBit


@dataclass(frozen=True)
class OperandFormat:
    """Dtypes and head dims of a kernel."""

    element: Element  # of the wgmma operands; also of the output, unless `out_element` is given
    dim_qk: int
    dim_v: int
    eight_bit: EightBit | None = None  # format of 8-bit keys and values in memory
    out_element: Element | None = None
    exact_values: bool = False  # prefill: whether P·V is one product of exactly the columns of 16-bit values
    first_value: int = 0  # first of the `dim_v` columns of values and output that a launch has, see `value_blocks`


class WithOperands:
    """A configuration that has the fields of its `operands` as its own. attrgetter reads them without a call of a
    Python function."""

    operands: OperandFormat

    if TYPE_CHECKING:
        element: Element
        dim_qk: int
        dim_v: int
        eight_bit: EightBit | None
        exact_values: bool
    else:
        element = property(attrgetter("operands.element"))
        dim_qk = property(attrgetter("operands.dim_qk"))
        dim_v = property(attrgetter("operands.dim_v"))
        eight_bit = property(attrgetter("operands.eight_bit"))
        exact_values = property(attrgetter("operands.exact_values"))
