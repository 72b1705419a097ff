"""Sizes of Hopper's prefill that depend on whether tensors have 8 bits; `SM90Config` inherits them. With 16-bit tensors
there are no scales and no conversion. This file imports no Triton."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from warpattn.problem.element import Element

from ...operand_format import WithOperands

WARP_TOPS = 4  # numbers that the warps of a warpgroup leave for each other, see `largest` in convert.py


class EightBitSizes(WithOperands):
    """The part of `SM90Config` about tiles that arrive in 8 bits and their scales."""

    if TYPE_CHECKING:
        consumers: int
        block_n: int
        kv_stages: int
        q_stages: int
        rows: int
        padded_qk: int
        padded_v: int
        q_bytes: int
        wg_tokens: int
        packed: int
        operand: Element
        products: bool
        converts: bool
        v_parts: tuple[int, ...]

    @property
    def widens_queries(self) -> bool:
        """Whether consumer warpgroups first widen 8-bit queries to 16 bits."""
        return self.converts and self.eight_bit is not None and self.eight_bit.queries

    @property
    def changes_queries(self) -> bool:
        """Whether consumer warpgroups first convert queries (8 bits or bf16) to fp16."""
        return self.widens_queries or self.operand != self.element

    @property
    def v_rows(self) -> int:
        """Rows of a V tile in shared memory, perhaps transposed."""
        return self.padded_v if self.products else self.block_n

    @property
    def v_columns(self) -> tuple[int, ...]:
        """Columns of the parts of a V tile."""
        return (self.block_n,) if self.products else self.v_parts

    @property
    def widening(self) -> int:
        """Bytes of a K or V operand per byte that TMA loads."""
        return 2 if self.converts else 1

    @property
    def loaded_q_bytes(self) -> int:
        """Bytes of a query tile that TMA loads."""
        return self.q_bytes // self.rows * self.wg_tokens * self.packed // (2 if self.widens_queries else 1)

    @cached_property
    def scale_bytes(self) -> int:
        """Bytes of the scales of K's and V's tokens in all slots."""
        if self.eight_bit is None or self.products:
            return 0
        scales = self.eight_bit.token_scales(self.padded_qk, self.padded_v)
        scales += bool(self.eight_bit.columns("k"))  # each key's largest scale, see `store_ratios`
        return 4 * scales * self.kv_stages * self.block_n

    @cached_property
    def query_factors(self) -> int:
        """Numbers per warpgroup and Q slot that give factors of its scores: each warp's largest query, for a power of
        two (`make_fractions`), or a scale for each row."""
        if self.widens_queries and self.eight_bit is not None:
            return self.rows if self.eight_bit.of_token("q") else 0
        return WARP_TOPS * (self.operand != self.element)

    @property
    def factor_bytes(self) -> int:
        """Bytes of the `query_factors` of all slots."""
        return 4 * self.q_stages * self.consumers * self.query_factors
