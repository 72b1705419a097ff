"""Sizes of P·V as one product of exactly the columns of the values, see ../exact_columns.py, and what registers hold
beside the output; without Triton."""

from __future__ import annotations

from functools import cache, cached_property
from typing import TYPE_CHECKING

from warpattn.kernels.topology import Registers

from ..operand_format import WithOperands

BOX_COLUMNS = 64  # 16-bit columns of a box of values: 128 bytes, the widest that shared memory is swizzled over
BESIDE = 28  # registers a thread, beside scores, weights of two key tiles, output, and one for each 16 keys; at 160
# columns and with 128 keys, fewer spill
STEP = 16  # columns of Q and K that one wgmma multiplies


@cache
def multiplies_exactly(dim_qk: int, dim_v: int, many: bool) -> bool:
    """Whether P·V of 16-bit values is faster as one exact product (bench/notes.md, 261). `many`: there are many
    queries, and no mask.

    Rows of a head dim that is no multiple of 16 start within a sector of memory, so their loads take longest, and the
    padding of the last box costs more than the product saves; but not at 40, and at 72 and 88 not for `many`. Nor do
    products save time with tiles of 32 keys, which queries of more than 256 columns have.
    """
    if dim_v % STEP:
        return dim_v == 40 or (dim_v in (72, 88) and many)
    return dim_qk <= 256 and 32 < dim_v < 256 and len(widths_of(dim_v)) > 1


@cache
def widths_of(columns: int) -> tuple[int, ...]:
    """Powers of two that add up to a number of columns, a multiple of 8; the widest first."""
    return tuple(width for width in (256, 128, 64, 32, 16, 8) if columns & width)


class ExactValues(WithOperands):
    """The part of `SM90Config` about accumulators of the output, and products of Q and K without their padding."""

    if TYPE_CHECKING:
        qk_parts: tuple[int, ...]
        v_parts: tuple[int, ...]
        store_parts: tuple[int, ...]
        columns_v: int
        block_n: int
        registers: Registers

    @cached_property
    def o_parts(self) -> tuple[int, ...]:
        """Columns of the parts of the output's accumulator."""
        return widths_of(self.dim_v) if self.exact_values else self.v_parts

    @property
    def value_products(self) -> int:
        """Groups of products that a key tile's values take."""
        return 1 if self.exact_values else len(self.v_parts)

    @cached_property
    def qk_chains(self) -> tuple[int, ...]:
        """Columns of each group of products of Q and K: the parts, or what is no padding in a single one."""
        alone = self.exact_values and len(self.qk_parts) == 1
        return widths_of(-(-self.dim_qk // STEP) * STEP) if alone else self.qk_parts

    @property
    def keeps_scores(self) -> bool:
        """Whether registers hold a key tile's scores beside its 16-bit weights, those of the tile before, and the
        output. Then weights come first, and a maximum only if one of them is too large."""
        numbers = self.block_n + self.columns_v // 2 + self.block_n // 16
        return numbers + BESIDE <= self.registers.consumer

    @property
    def stores_whole(self) -> bool:
        """Whether a warpgroup stages its whole output at once."""
        return sum(self.store_parts) >= self.columns_v
