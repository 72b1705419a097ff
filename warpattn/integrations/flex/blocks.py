"""Turns a BlockMask's blocks into a mask with bounds.

FlexAttention lists, for every block of query rows, the blocks of keys that are partly visible (there mask_mod decides)
and those that are full. Both lists become one small table, and bounds for tiles of rows are prepared from it:

    table[b, h, row block, key block]    0 hidden, 1 mask_mod decides, 2 visible

    row blocks of a tile      first key               last key               full part
    i = of q_lo, j = of q_hi  least of blocks >= i    most of blocks <= j    common to i and j, if j <= i + 1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from warpattn.language.expr import load, maximum, minimum, where
from warpattn.language.traced import Lengths
from warpattn.masks import Mask, Span
from warpattn.scores import broadcast_index

LARGEST_BLOCK = 1 << 30  # a block size that FlexAttention uses for "everything is one block"
PARTIAL, FULL = 1, 2
Value = Any  # a symbol, a number or a tensor


@dataclass(frozen=True, eq=False)
class BlockSparse(Mask):
    """`inner` where the table says 1, everything where it says 2, nothing elsewhere; blocks of `rows` by `keys`."""

    inner: Mask
    table: Tensor  # [B or 1, H or 1, row blocks, key blocks] int8
    bounds: Tensor  # [4, B or 1, H or 1, row blocks] int32: first, full_lo, full_hi, last in keys
    rows: int
    keys: int

    @classmethod
    def read(cls, inner: Mask, blocks: Any) -> BlockSparse:
        """Make the mask of torch's BlockMask `blocks`, on its device."""
        rows, keys = blocks.BLOCK_SIZE
        size = -(-blocks.seq_lengths[1] // keys)  # lists may be shorter or longer than that, and differ
        table = _marked(blocks.kv_num_blocks, blocks.kv_indices, size, PARTIAL)
        if blocks.full_kv_num_blocks is not None:
            table = torch.maximum(table, _marked(blocks.full_kv_num_blocks, blocks.full_kv_indices, size, FULL))
        while table.ndim < 4:
            table = table[None]
        return cls(inner, table, (_bounds(table) * keys).to(torch.int32), rows, keys)

    def keep(self, b: Value, h: Value, q: Value, k: Value, lens: Lengths | None = None) -> Value:
        place = (_row(q, lens) // self.rows, k // self.keys)
        state = load(self.table, *broadcast_index(self.table.shape[:2], (b, h)), *place)
        return (state == FULL) | ((state == PARTIAL) & self.inner.keep(b, h, q, k, lens))

    def kv_span(self, b: Value, h: Value, q_lo: Value, q_hi: Value, lens: Lengths) -> Span:
        i = maximum(_row(q_lo, lens), 0) // self.rows
        j = _row(minimum(q_hi, lens.k - 1), lens) // self.rows  # rows after the last query do not exist
        near = j - i <= 1
        full_lo = maximum(self._bound(1, b, h, i), self._bound(1, b, h, j))
        full_hi = minimum(self._bound(2, b, h, i), self._bound(2, b, h, j))
        last = self._bound(3, b, h, j)
        return Span(self._bound(0, b, h, i), where(near, full_lo, lens.k), where(near, full_hi, 0), last)

    def _bound(self, which: int, b: Value, h: Value, block: Value) -> Value:
        return load(self.bounds, which, *broadcast_index(self.bounds.shape[1:3], (b, h)), block)


def _row(q: Value, lens: Lengths | None) -> Value:
    return q if lens is None else q - (lens.k - lens.q)


def _marked(counts: Tensor, indices: Tensor, size: int, state: int) -> Tensor:
    """Make a table [..., row blocks, size] with `state` in the first counts[...] blocks of each row's indices."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    wide = torch.zeros((*counts.shape, size + 1), dtype=torch.int8, device=indices.device)
    place = torch.where(listed & (indices < size), indices, size).long()  # others go into an extra column
    return wide.scatter_(-1, place, state)[..., :size].contiguous()


def _bounds(table: Tensor) -> Tensor:
    """first, full_lo, full_hi, last in blocks [4, ..., row blocks]; see the module for which row blocks they cover."""
    size = table.shape[-1]
    block = torch.arange(size, device=table.device).expand(table.shape)
    seen, full = table > 0, table == FULL
    first = torch.where(seen, block, size).amin(-1).flip(-1).cummin(-1).values.flip(-1)
    last = torch.where(seen, block + 1, 0).amax(-1).cummax(-1).values
    start = torch.where(full, -1, block).cummax(-1).values + 1  # of the run of full blocks that ends at a block
    length, end = torch.where(full, block + 1 - start, 0).max(-1)
    return torch.stack([first, end + 1 - length, torch.where(length > 0, end + 1, 0), last])
