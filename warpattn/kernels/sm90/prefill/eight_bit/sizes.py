"""Sizes of Hopper's prefill that 8-bit tensors change. Those of 16 bits have none of the scales, and arrive as they are
multiplied. Nothing in this file imports Triton."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from warpattn.problem.element import Element

from ...operand_format import WithOperands


class EightBitSizes(WithOperands):
    """What a config says of tiles that arrive in 8 bits, and of their scales."""

    if TYPE_CHECKING:
        consumers: int
        block_n: int
        kv_stages: int
        q_stages: int
        rows: int
        padded_qk: int
        padded_v: int
        q_bytes: int
        operand: Element
        products: bool
        converts: bool
        v_parts: tuple[int, ...]

    @property
    def widens_queries(self) -> bool:
        """Whether the warpgroups that multiply queries of 8 bits make 16-bit ones of them first."""
        return self.converts and self.eight_bit is not None and self.eight_bit.queries

    @property
    def changes_queries(self) -> bool:
        """Whether those that multiply queries convert them first."""
        return self.widens_queries or self.operand != self.element

    @property
    def v_rows(self) -> int:
        """Rows of a tile of values in shared memory."""
        return self.padded_v if self.products else self.block_n

    @property
    def v_columns(self) -> tuple[int, ...]:
        """Columns of its parts."""
        return (self.block_n,) if self.products else self.v_parts

    @property
    def widening(self) -> int:
        """Bytes of an element of keys and values where it is multiplied, for each byte of it that arrives."""
        return 2 if self.converts else 1

    @property
    def loaded_q_bytes(self) -> int:
        """Of a tile of queries, as they arrive."""
        return self.q_bytes // 2 if self.widens_queries else self.q_bytes

    @cached_property
    def scale_bytes(self) -> int:
        """Of the scales of the tokens of all slots."""
        if self.eight_bit is None or self.products:
            return 0
        scales = self.eight_bit.token_scales(self.padded_qk, self.padded_v)
        scales += bool(self.eight_bit.columns("k"))  # the largest of a key's
        return 4 * scales * self.kv_stages * self.block_n

    @cached_property
    def query_factors(self) -> int:
        """Of scores, loaded with a warpgroup's queries: a power of two (`make_fractions`), or scales of all rows."""
        if self.widens_queries and self.eight_bit is not None:
            return self.rows if self.eight_bit.of_token("q") else 0
        return int(self.operand != self.element)

    @property
    def factor_bytes(self) -> int:
        """Of these, in all slots."""
        return 4 * self.q_stages * self.consumers * self.query_factors
