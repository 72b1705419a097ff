"""Turns flash-attn's options into masks and scores, for all of its versions.

flash-attn and this package agree on most: causal and windows are aligned to the bottom right, the score is scaled, then
capped, then biased, a row that sees nothing gives 0. Its window (left, right) counts keys on either side of the
query's own: keys from q - left to q + right. Which values mean "no limit" differs:

    versions 2, 3    None and every negative number                                  `two_limits`
    version 4        only None: (8, -3) means keys q - 8 to q - 3; left + right < 0: no limit on either side
                                                                                     `two_offsets`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any, NamedTuple

from torch import Tensor

from warpattn import Backend
from warpattn.errors import AttentionError
from warpattn.inputs import is_tensor, kind_of, number
from warpattn.language.traced import MAX_INT, Lengths
from warpattn.masks import Causal, Chunked, CustomMask, Mask, SlidingWindow, Span
from warpattn.scores import ALiBi, Score, SoftCap, chained

Value = Any  # a symbol, a number or a tensor
NO_LIMIT = MAX_INT - 1  # a side of a window that no sequence reaches


class Tail(NamedTuple):
    """The keyword arguments of this package's functions."""

    mask: Mask | None = None
    score: Score | None = None
    sinks: Tensor | None = None
    scale: float | None = None
    backend: str | Backend = "auto"


class Window(NamedTuple):
    """Keys from q - left to q + right; None: no limit on that side."""

    left: int | None
    right: int | None


@dataclass(frozen=True)
class Band(Mask):
    """A window with a negative side: it begins after the query's own key or ends before it."""

    window: Window

    def keep(self, b: Value, h: Value, q: Value, k: Value, lens: Lengths | None = None) -> Value:
        left, right = self.window
        return (True if left is None else k >= q - left) & (True if right is None else k <= q + right)

    def kv_span(self, b: Value, h: Value, q_lo: Value, q_hi: Value, lens: Lengths) -> Span:
        left, right = self.window
        first, full_lo = (0, 0) if left is None else (q_lo - left, q_hi - left)
        full_hi, last = (lens.k, lens.k) if right is None else (q_lo + right + 1, q_hi + right + 1)
        return Span(first, full_lo, full_hi, last)


def visible(causal: Any, window: Window, chunk: Any = 0, first_key: Tensor | None = None) -> Mask | None:
    """Make the mask of flash-attn's `causal`, `window_size`, `attention_chunk` and `cache_leftpad`; None: no mask."""
    left, right = window.left, 0 if causal else window.right
    masks: list[Mask] = []
    if left is not None and (left < 0 or (right is not None and right < 0)):
        masks.append(Band(Window(left, right)))
    elif left is not None:
        masks.append(SlidingWindow(left + 1, right))
    elif right is not None and right != 0:
        masks.append(SlidingWindow(None, right) if right > 0 else Band(Window(None, right)))
    elif right is not None:
        masks.append(Causal())
    size = 0 if chunk is None else number(chunk)
    if not isinstance(size, int) or not 0 <= size <= MAX_INT:
        raise AttentionError(f"attention_chunk is {kind_of(chunk)}; it must be 0 or a number of positions")
    if size:
        masks.append(_chunked(size, first_key))
    if first_key is not None:
        masks.append(CustomMask(lambda b, h, q, k, first: k >= first[b], first=first_key))
    return reduce(and_, masks) if masks else None


def _chunked(size: int, first_key: Tensor | None) -> Mask:
    """Make the mask of chunks of positions, counted from a sequence's first key."""
    if first_key is None:
        return Chunked(size)
    chunk = CustomMask(lambda b, h, q, k, first: (q - first[b]) // size == (k - first[b]) // size, first=first_key)
    return SlidingWindow(size, size - 1) & chunk


def scored(softcap: float = 0.0, slopes: Tensor | None = None) -> Score | None:
    """Make the score of flash-attn's `softcap` (0: none) and `alibi_slopes` ((heads,) or (batch, heads)), or None."""
    size = 0 if softcap is None else number(softcap)
    return chained(None if size == 0 else SoftCap(softcap), None if slopes is None else ALiBi(slopes))


def backend_for(deterministic: bool) -> str | Backend:
    """Return the backend for flash-attn's `deterministic`, about gradients; False leaves it to torch's switch."""
    return Backend(deterministic=True) if deterministic else "auto"


def two_limits(window: Any) -> Window:
    """Read `window_size` of versions 2 and 3: a negative number is no limit."""
    return Window(*(None if x is None or x < 0 else x for x in _pair(window, "-1 meaning no limit")))


def two_offsets(window: Any, causal: bool) -> Window:
    """Read `window_size` of version 4: only None is no limit, and a pair that leaves no key means no window."""
    left, right = _pair(window, "None meaning no limit")
    right = 0 if causal else right
    empty = left is not None and right is not None and left + right < 0
    return Window(None, None) if empty else Window(left, right)


def _pair(window: Any, no_limit: str) -> Window:
    """Read two ints (also NumPy's or 0-dimensional tensors), or a tensor or array of them; too large ones give None."""
    readable = is_tensor(window) if isinstance(window, Tensor) else hasattr(window, "tolist")
    listed = window.tolist() if readable and getattr(window, "shape", None) == (2,) else window
    pair = listed if isinstance(listed, Sequence) and not isinstance(listed, str) else ()
    sides = [None if x is None else number(x) for x in pair]
    fits = all(x is None or isinstance(found, int) for x, found in zip(pair, sides, strict=True))
    if len(sides) != 2 or not fits:
        rule = f"it must be a pair of ints (left, right), {no_limit}"
        raise AttentionError(f"window_size is {kind_of(window)}; {rule}")
    left, right = (None if x is None or x >= NO_LIMIT else max(int(x), -NO_LIMIT) for x in sides)
    return Window(left, right)
