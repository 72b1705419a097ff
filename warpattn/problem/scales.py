"""8-bit keys and values as kernels take them: their part of a config (`EightBit`), and scales as launch arguments.

The launch fills named tuples and the kernel reads their fields by name. Nothing here imports Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpattn.problem.argument_types import Int64
from warpattn.problem.element import ELEMENT_OF, Element
from warpattn.problem.operands import Operands
from warpattn.problem.problem import Problem
from warpattn.problem.problem import Scales as Granularities
from warpattn.quantized import ROW_BLOCKS, granularity
from warpattn.sequences import Sequence


@dataclass(frozen=True)
class EightBit:
    """8-bit keys and values, and perhaps queries. Kernels convert them to 16 bits (sm90/prefill/eight_bit/convert.py,
    sm90/decode/eight_bit.py, amd/kv_buffer.py) unless they multiply in 8 bits (sm90/prefill/eight_bit/weights.py)."""

    element: Element  # where the kernel reads them: of 16 bits after sm90/copies
    scales: Granularities  # of k, v and q
    queries: bool = False  # whether queries have 8 bits, too
    rope: Element | None = None  # of the last, rotary columns of keys, if these are in a tensor of their own

    @property
    def widened(self) -> bool:
        """Whether an earlier launch has made 16-bit copies, so that the kernel only applies their scales."""
        return self.element.bytes > 1

    @property
    def by_token(self) -> bool:
        """Whether a scale of keys, values or queries is looked up for each token of a head."""
        return any(self.of_token(operand) for operand in self.scales._fields)

    def of_token(self, operand: str) -> bool:
        """`by_token` of one operand: it has scales per token, per block of columns or per block of rows."""
        per = getattr(self.scales, operand)
        return per == "token" or isinstance(per, int) or per in ROW_BLOCKS

    def columns(self, operand: str) -> int:
        """Columns of a head that share a scale, for scales per block of columns; else 0."""
        per = getattr(self.scales, operand)
        return per if isinstance(per, int) else 0

    def blocks(self, operand: str, columns: int) -> int:
        """The number of blocks with their own scale in a tile of `columns` columns."""
        return columns // (self.columns(operand) or columns)

    def token_scales(self, columns_qk: int, columns_v: int) -> int:
        """The number of scales of one token's key and value together, for tiles with these columns."""
        return self.blocks("k", columns_qk) + self.blocks("v", columns_v) if self.by_token else 0

    def rows(self, operand: str) -> int:
        """Tokens of a head that share a scale, for scales per block of rows; else 0."""
        return ROW_BLOCKS.get(getattr(self.scales, operand), 0)


def eight_bit_of(problem: Problem) -> EightBit | None:
    """Return the 8-bit keys and values of a problem; None without any."""
    if problem.kv_dtype is None:
        return None
    return EightBit(ELEMENT_OF[problem.kv_dtype], problem.scales, problem.q_dtype is not None)


class ScaleRows(NamedTuple):
    """A scale of 8-bit keys or values with its strides, 0 for dimensions that it does not have."""

    scale: Any  # float*
    outer: Int64  # from one batch entry or page to the next
    row: Int64
    head: Int64


class ColumnScaleRows(NamedTuple):
    """As `ScaleRows`, for scales per block of columns."""

    scale: Any  # float*
    outer: Int64
    row: Int64
    head: Int64
    block: Int64  # from one block to the next


class Scales(NamedTuple):
    """The `scale` argument of attention over 8-bit keys and values; only 8-bit queries have a scale `q`."""

    scores: Any  # softmax scale, fp32
    k: Any  # ScaleRows, or ColumnScaleRows
    v: Any
    q: Any


def scale_rows(x: Tensor, scale: Tensor | None) -> ScaleRows | ColumnScaleRows:
    """Make the argument for the scale of keys or values x (batch or page, row, head, dim) or (row, head, dim)."""
    if scale is None or scale.ndim < 2:
        return ScaleRows(scale, 0, 0, scale.stride(0) if scale is not None and scale.ndim else 0)
    rows = ScaleRows(scale, *[0] * (4 - x.ndim), *scale.stride()[: x.ndim - 1])
    return ColumnScaleRows(*rows, scale.stride(-1)) if isinstance(granularity(scale, x.shape), int) else rows


def latent_scales(x: Tensor, scale: Tensor | None) -> ColumnScaleRows:
    """Make the argument for the scale of latents x (pages, page size, heads, columns); without a scale it is 1."""
    scale = x.new_ones((), dtype=torch.float32) if scale is None else scale
    steps = (0, 0, *scale.stride()) if scale.ndim == 1 else scale.stride() or (0, 0, 0)
    return ColumnScaleRows(scale, *(*steps, 0)[:4])


def call_scales(scale: float, x: Operands, sequence: Sequence) -> Scales:
    """Return the softmax scale and the scales of 8-bit keys, values and queries as one argument."""
    pairs = ((x.k, sequence.k_scale), (x.v, sequence.v_scale), (x.q, sequence.q_scale))
    return Scales(scale, *(scale_rows(*pair) for pair in pairs))
