"""Prompts whose images see both directions (vLLM's "multimodal prefix"): a token of an image sees the whole image.

    prompt      text text  image image image image  text        ranges of an image: [2, 5] of the prompt's positions
    token 3     k <= 3  or 2 <= k < 6                           on top of what the layer's mask shows

vLLM gives the ranges of each request on the host. The table is per new token, since vLLM never splits an image between
steps; it stays at one address, so masks over it are made once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from warpattn.integrations.step_plans import LayerModifiers, rounded
from warpattn.language.expr import load, maximum, minimum, where
from warpattn.language.traced import Lengths
from warpattn.masks import Causal, Mask, SlidingWindow
from warpattn.masks.program import Span

Value = Any  # a symbol, a number or a tensor


@dataclass(frozen=True, eq=False)
class WithRanges(Mask):
    """`mask`, plus the keys of each query's range. ranges: int32 (2, tokens), first key and one past the last, 0 and 0
    for none; a sequence's tokens begin at starts[b], int32."""

    mask: Mask
    ranges: Tensor
    starts: Tensor

    def keep(self, b: Value, h: Value, q: Value, k: Value, lens: Lengths | None = None) -> Value:
        first, end = self._range(b, q, lens)
        return self.mask.keep(b, h, q, k, lens) | ((k >= first) & (k < end))

    def kv_span(self, b: Value, h: Value, q_lo: Value, q_hi: Value, lens: Lengths) -> Span:
        span = self.mask.kv_span(b, h, q_lo, q_hi, lens)
        first, end = self._range(b, q_lo, lens)  # a range that begins before these rows contains the first
        _, newest = self._range(b, minimum(q_hi, lens.k - 1), lens)
        oldest = minimum(span.first, where(end > 0, first, span.first))
        return Span(oldest, span.full_lo, span.full_hi, maximum(span.last, newest))

    def _range(self, b: Value, q: Value, lens: Lengths | None) -> tuple[Value, Value]:
        token = load(self.starts, b) + (q if lens is None else q - (lens.k - lens.q))
        return load(self.ranges, 0, token), load(self.ranges, 1, token)


class ImageRanges:
    """The ranges of a step's tokens on the card, and masks of layers with them."""

    def __init__(self, tokens: int, requests: int, device: torch.device) -> None:
        self.tokens, self.requests = rounded(tokens), rounded(requests)
        self._memory = torch.zeros(2 * self.tokens + self.requests, dtype=torch.int32, device=device)
        self.ranges = self._memory[: 2 * self.tokens].view(2, self.tokens)
        self.starts = self._memory[2 * self.tokens :]
        self._masks: dict[Any, LayerModifiers] = {}

    def holds(self, tokens: int, requests: int) -> bool:
        return tokens <= self.tokens and requests <= self.requests

    def write(self, starts: list[int], found: list[tuple[int, int, int, int]]) -> None:
        """Copy to the card, at once, where requests begin, and (first token, one past the last, first key, one past the
        last) of every range."""
        host = torch.zeros(len(self._memory), dtype=torch.int32, device="cpu", pin_memory=self._memory.is_cuda)
        ranges = host[: 2 * self.tokens].view(2, self.tokens)
        for begin, stop, first, end in found:
            ranges[0, begin:stop] = first
            ranges[1, begin:stop] = end
        host[2 * self.tokens :][: len(starts)] = torch.tensor(starts, dtype=torch.int32, device="cpu")
        self._memory.copy_(host, non_blocking=True)

    def over(self, layer: LayerModifiers, within_window: bool) -> LayerModifiers:
        """Return a layer's modifiers with the ranges; `within_window`: a window bounds ranges, too (Gemma 4)."""
        key = (layer, within_window)
        if key not in self._masks:
            mask, window = layer.mask, getattr(layer.mask, "window", None)
            if within_window and isinstance(mask, SlidingWindow):
                mask = WithRanges(Causal(), self.ranges, self.starts) & SlidingWindow(window, right=None)
            else:
                mask = WithRanges(mask, self.ranges, self.starts)
            self._masks[key] = layer._replace(mask=mask)
        return self._masks[key]


def ranges_of(common: Any) -> tuple[list[int], list[tuple[int, int, int, int]]]:
    """Return where requests of a batch begin, and its ranges for `ImageRanges.write`; none without a new token in one.

    vLLM's ranges are (first, last) positions of each request; its bounds of lengths are exact for prompts."""
    given, bounds = getattr(common, "mm_req_doc_ranges", None), getattr(common, "seq_lens_cpu_upper_bound", None)
    if not given or bounds is None or common.max_query_len <= 1:  # a token alone is the last one in the cache
        return [], []
    starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
    found = []
    for request, ranges in given.items():
        if request >= common.num_reqs:
            continue
        start, count = starts[request], starts[request + 1] - starts[request]
        context = int(bounds[request]) - count
        for first, last in ranges or ():
            begin, stop = max(first - context, 0), min(last + 1 - context, count)
            if first < last and begin < stop:
                found.append((start + begin, start + stop, first, last + 1))
    return starts[:-1], found
