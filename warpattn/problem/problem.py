"""A call, and what it is without its tensors.

Two calls with equal problems run the same compiled kernel, so a `Problem` is the cache key of plans and kernels.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from warpattn.language.nodes import SPAN, Reads, reads
from warpattn.masks import Mask, MaskProgram
from warpattn.problem.element import ELEMENT_OF, Element
from warpattn.quantized import ROW_BLOCKS
from warpattn.scores import Score, ScoreProgram
from warpattn.sequences import Sequence


class Scales(NamedTuple):
    """What scales of 8-bit tensors belong to, see `quantized.granularity`."""

    k: str | int | None = None
    v: str | int | None = None
    q: str | int | None = None


NO_SCALES = Scales()


@dataclass(frozen=True)
class Problem:
    """One attention problem without tensors; hashable. Lengths are as in `Sizes` (totals for ragged batches)."""

    kind: str  # "dense" | "ragged" | "paged" | "paged-ragged"
    device_type: str
    dtype: torch.dtype  # of the output, and of q, k and v if these have no other
    batch: int
    seq_q: int
    seq_k: int
    heads_q: int
    heads_kv: int
    dim_qk: int
    dim_v: int
    page_size: int  # 0 without pages
    mask: Hashable  # MaskProgram.key: the nodes, and dtype and rank of each captured tensor
    score: Hashable  # ScoreProgram.key, additive masks included; None for plain scores
    has_sinks: bool
    has_lse: bool
    max_q: int = 0  # queries of a sequence at most where `seq_q` is a total over pages, else 0
    kv_dtype: torch.dtype | None = None  # of 8-bit keys and values; None: that of q
    q_dtype: torch.dtype | None = None  # of 8-bit queries; None: that of the output
    scales: Scales = NO_SCALES
    rope: int = 0  # columns of keys, the last, in the dtype of the output beside 8-bit ones
    narrow_rope: bool = False  # whether these have 8 bits, too
    q_rope: int = 0  # columns of queries, the last, that are in a tensor of their own

    @property
    def ragged_queries(self) -> bool:
        """Whether sequences may have different numbers of queries."""
        return self.kind in ("ragged", "paged-ragged")

    @property
    def longest_q(self) -> int:
        """Queries of a sequence at most, as far as known: their total, for ragged ones that are not paged."""
        return self.max_q or self.seq_q

    @cached_property
    def span_reads(self) -> Reads:
        """What the mask's interval of keys (`MaskProgram.span`) is computed from."""
        return reads(self.mask, SPAN)

    @property
    def block_scales(self) -> Scales:
        """`scales` for kernels that take blocks of rows and no tokens: the token of a sequence of one is a block."""
        lengths = {"k": self.seq_k, "q": self.seq_q} if self.kind == "dense" else {}
        alone = [name for name, length in lengths.items() if length == 1 and getattr(self.scales, name) == "token"]
        return self.scales._replace(**dict.fromkeys(alone, next(iter(ROW_BLOCKS))))

    @property
    def element(self) -> Element:
        """Of the output, and of q, k and v if these have no other."""
        return ELEMENT_OF[self.dtype]

    @property
    def kv_element(self) -> Element:
        """Of k and v."""
        return ELEMENT_OF[self.kv_dtype or self.dtype]


@dataclass(slots=True, eq=False)
class Call:
    """The arguments of one attention call, as given: what `api` hands to the runtime.

    Nothing changes it once `api` has made it. It is not frozen because every call makes one, and a frozen one takes a
    microsecond longer.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sequence: Sequence
    mask: Mask | None = None
    score: Score | None = None
    sinks: Tensor | None = None
    scale: float | None = None
    return_lse: bool = False
    out: Tensor | None = None
    backend: str = "auto"
    deterministic: bool | None = None  # of gradients; None: as torch's switch says when they are taken


@dataclass(frozen=True, eq=False)
class CheckedCall:
    """A checked call: the backend to run (of BACKENDS, but not "auto"), its problem, and the traced mask and score."""

    backend: str
    problem: Problem
    mask: MaskProgram
    score: ScoreProgram | None
    scale: float
    lse_shape: tuple[int, ...]
    differentiated: tuple[str, ...] = ()  # names of the inputs that require gradients
    exponent: float = 0.0  # the largest scale * log2(e) * (q . k) whose q . k is fp32, of finite operands
