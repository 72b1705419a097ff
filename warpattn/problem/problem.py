"""`Call`, the arguments of a call; `Problem`, the call without its tensors; `CheckedCall`, a call that broke no rule.

Two calls with equal problems run the same compiled kernel, so a `Problem` is the cache key of plans and kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from warpattn.language.nodes import SPAN, ProgramKey, Reads, reads
from warpattn.masks import Mask, MaskProgram
from warpattn.problem.element import ELEMENT_OF, Element
from warpattn.quantized import ROW_BLOCKS
from warpattn.scores import Score, ScoreProgram
from warpattn.sequences import Sequence


class Scales(NamedTuple):
    """Granularities of the scales of 8-bit tensors, see `quantized.granularity`."""

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
    mask: ProgramKey
    score: ProgramKey | None  # additive masks included; None for plain scores
    has_sinks: bool
    has_lse: bool
    max_q: int = 0  # most queries of a sequence of a ragged batch over pages, whose `seq_q` is a total; else 0
    kv_dtype: torch.dtype | None = None  # of 8-bit keys and values; None: that of q
    q_dtype: torch.dtype | None = None  # of 8-bit queries; None: that of the output
    scales: Scales = NO_SCALES
    v_transposed: bool = field(default=False, repr=False)  # 8-bit values come transposed, too; tuning ignores it
    rope: int = 0  # the last columns of 8-bit latents that are in a separate rotary part
    narrow_rope: bool = False  # whether that part has 8 bits, too
    q_rope: int = 0  # the last columns of queries that are in a tensor of their own

    @property
    def ragged_queries(self) -> bool:
        """Whether sequences may have different numbers of queries."""
        return self.kind in ("ragged", "paged-ragged")

    @property
    def longest_q(self) -> int:
        """The most queries of a sequence, as far as known: their total for ragged sequences that are not paged."""
        return self.max_q or self.seq_q

    @cached_property
    def span_reads(self) -> Reads:
        """What the mask's interval of keys (`MaskProgram.span`) is computed from."""
        return reads(self.mask, SPAN)

    @property
    def block_scales(self) -> Scales:
        """`scales` for kernels with scales per block of rows but not per token: a single token counts as a block."""
        lengths = {"k": self.seq_k, "q": self.seq_q} if self.kind == "dense" else {}
        alone = [name for name, length in lengths.items() if length == 1 and getattr(self.scales, name) == "token"]
        return self.scales._replace(**dict.fromkeys(alone, next(iter(ROW_BLOCKS))))

    @property
    def element(self) -> Element:
        """The element type of the output, and of q, k and v if these have no other."""
        return ELEMENT_OF[self.dtype]

    @property
    def kv_element(self) -> Element:
        """The element type of k and v."""
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
    deterministic: bool | None = None  # of gradients; None: follow torch's switch when they are computed


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
    exponent: float = 0.0  # bounds scale * log2(e) * (q . k) for finite operands whose q . k is an fp32 number
