"""Masks of one's own in a batch: the bools of all requests end to end, as FlashInfer takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from warpattn.errors import AttentionError
from warpattn.language.expr import load
from warpattn.language.traced import Lengths
from warpattn.masks import Mask

__all__ = ["FlatMask", "flat_mask"]

Value = Any  # a symbol, a number or a tensor


@dataclass(frozen=True, eq=False)
class FlatMask(Mask):
    """seen[starts[b] + row · keys + key]: bool, every request's rows of (queries, keys) after those of the one before;
    starts: int32 (batch,)."""

    seen: Tensor
    starts: Tensor

    def keep(self, b: Value, h: Value, q: Value, k: Value, lens: Lengths | None = None) -> Value:
        if lens is None:
            raise AttentionError("a mask of a batch is read without lengths; its rows are as long as a request's keys")
        return load(self.seen, load(self.starts, b) + (q - (lens.k - lens.q)) * lens.k + k)


def flat_mask(given: Tensor, cu_q: Tensor, keys: Tensor, device: torch.device) -> FlatMask:
    """The mask of requests with offsets cu_q (batch + 1,) and numbers of keys (batch,), both on the host."""
    sizes = cu_q.diff().long() * keys.long()
    ends = sizes.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    if given.numel() != total:
        rule = f"the requests have {total} pairs of a query and a key"
        raise AttentionError(f"custom_mask has {given.numel()} elements; {rule}")
    if total >= 2**31:
        raise AttentionError(f"custom_mask has {total} elements; it may have up to 2**31 - 1")
    return FlatMask(given.bool().to(device), (ends - sizes).to(device, torch.int32))
