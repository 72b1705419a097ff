"""FlashInfer's custom masks of a batch: the bools of all requests end to end, or their bits.

    bits   request 0: 5 × 3 pairs  ▶ 2 bytes     request 1: 2 × 4 pairs  ▶ 1 byte     the first pair in the lowest bit
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from warpattn.errors import AttentionError, Rules, many
from warpattn.inputs import is_tensor, kind_of
from warpattn.integrations.signature import require_integers
from warpattn.language.expr import load
from warpattn.language.traced import Lengths
from warpattn.masks import Mask

Value = Any  # a symbol, a number or a tensor


@dataclass(frozen=True, eq=False)
class FlatMask(Mask):
    """seen[starts[b] + row · keys + key]: bool, the (queries, keys) of request b from starts[b] on; starts: int32
    (batch,)."""

    seen: Tensor
    starts: Tensor

    def keep(self, b: Value, h: Value, q: Value, k: Value, lens: Lengths | None = None) -> Value:
        if lens is None:
            raise AttentionError("a mask of a batch is read without lengths; its rows are as long as a request's keys")
        return load(self.seen, load(self.starts, b) + (q - (lens.k - lens.q)) * lens.k + k)


def flat_mask(given: Tensor, cu_q: Tensor, keys: Tensor, device: torch.device) -> FlatMask:
    """Make the mask of requests with offsets cu_q (batch + 1,) and numbers of keys (batch,), both on the host."""
    sizes = _sizes(cu_q, keys)
    _check("custom_mask", given, sizes)
    return FlatMask(given.to(device, torch.bool, copy=True), _starts(sizes).to(device, torch.int32))


def packed_mask(given: Tensor, cu_q: Tensor, keys: Tensor, device: torch.device) -> FlatMask:
    """Make the mask from bits, uint8: every request begins at a new byte, its first pair in the lowest bit."""
    if given.dtype != torch.uint8:
        raise AttentionError(f"packed_custom_mask has dtype {given.dtype}; it must be uint8, with 8 pairs in each")
    sizes = (_sizes(cu_q, keys) + 7) // 8
    _check("packed_custom_mask", given, sizes, 8)
    bits = given.to(device)[:, None] >> torch.arange(8, dtype=torch.uint8, device=device) & 1
    return FlatMask(bits.flatten().bool(), (_starts(sizes) * 8).to(device, torch.int32))


def _sizes(cu_q: Tensor, keys: Tensor) -> Tensor:
    return cu_q.diff().long() * keys.long()


def _starts(sizes: Tensor) -> Tensor:
    return sizes.cumsum(0) - sizes


def _check(name: str, given: Tensor, sizes: Tensor, pairs: int = 1) -> None:
    """Check that a mask has sum(sizes) elements of `pairs` pairs each, and that int32 can count the pairs."""
    total = int(sizes.sum())
    if given.numel() != total:
        what = "pairs of a query and a key" if pairs == 1 else "bytes, of each request as many as its pairs need"
        raise AttentionError(f"{name} has {many(given.numel(), 'element')}; the requests have {total} {what}")
    if total * pairs >= 2**31:
        raise AttentionError(f"{name} has {given.numel()} elements; it may have up to {(2**31 - 1) // pairs}")


def packbits(x: Tensor, bitorder: str = "big") -> Tensor:
    """Pack x (bool, or numbers, 0 is False) into bits, uint8; the first of 8 is the highest ("big") or the lowest
    ("little") bit of a byte."""
    if not is_tensor(x):
        raise AttentionError(f"x is {kind_of(x)}; it must be a tensor")
    if not isinstance(bitorder, str) or bitorder not in ("big", "little"):
        raise AttentionError(f"bitorder is {kind_of(bitorder)}; it must be big or little")
    bits = torch.nn.functional.pad((x != 0).flatten().byte(), (0, -x.numel() % 8)).view(-1, 8)
    places = torch.arange(8, dtype=torch.uint8, device=x.device)
    shifts = places if bitorder == "little" else 7 - places
    return (bits << shifts).sum(1, dtype=torch.uint8)


def segment_packbits(x: Tensor, indptr: Tensor, bitorder: str = "big") -> tuple[Tensor, Tensor]:
    """Pack each segment x[indptr[i]:indptr[i + 1]], from a new byte on; return the bytes and the offsets of segments in
    them. Reads indptr back from a card."""
    rules = Rules()
    fine = rules.tensor("x", x, "elements") & rules.tensor("indptr", indptr, "segments + 1")
    ends = [0]
    if fine:
        require_integers("indptr", indptr)
        ends = indptr.tolist()
        what, rule = f"indptr is {ends}", f"it must begin with 0, not fall, and end with the elements of x, {len(x)}"
        rules.require(ends[:1] == [0] and sorted(ends) == ends and ends[-1] == len(x), what, rule)
    rules.done()
    parts = [packbits(x[begin:end], bitorder) for begin, end in pairwise(ends)]
    starts = torch.tensor([0, *accumulate(map(len, parts))], dtype=indptr.dtype, device=indptr.device)
    return torch.cat(parts) if parts else x.new_empty(0, dtype=torch.uint8), starts
