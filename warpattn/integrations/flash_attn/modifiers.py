"""flash-attn's options as masks and scores of this package, the same in all of its versions.

flash-attn and this package agree on most: causal and windows are aligned to the bottom right, the score is scaled, then
capped, then biased, a row that sees nothing gives 0. Its window (left, right) counts keys on either side of the
query's own; -1 and None mean no limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import and_
from typing import Any, NamedTuple

from torch import Tensor

from warpattn import Backend
from warpattn.errors import AttentionError
from warpattn.language.traced import is_int
from warpattn.masks import Causal, Chunked, CustomMask, Mask, SlidingWindow
from warpattn.scores import ALiBi, Score, SoftCap

__all__ = ["Tail", "placed", "scored", "visible"]


class Tail(NamedTuple):
    """The keyword tail of this package's functions."""

    mask: Mask | None = None
    score: Score | None = None
    sinks: Tensor | None = None
    scale: float | None = None
    backend: str | Backend = "auto"


def visible(causal: bool, window: Sequence[int | None], chunk: int = 0, first_key: Tensor | None = None) -> Mask | None:
    """Keys of flash-attn's `causal`, `window_size`, `attention_chunk` and `cache_leftpad`; None: all of them."""
    left, right = _window(window)
    right = 0 if causal else right
    masks: list[Mask] = []
    if left is not None:
        masks.append(SlidingWindow(left + 1, right))
    elif right is not None:
        masks.append(Causal() if right == 0 else SlidingWindow(None, right))
    if chunk:
        if not is_int(chunk, 1):
            raise AttentionError(f"attention_chunk is {chunk!r}; it must be 0 or a number of positions")
        masks.append(Chunked(chunk))
    if first_key is not None:
        masks.append(CustomMask(lambda b, h, q, k, first: k >= first[b], first=first_key))
    return reduce(and_, masks) if masks else None


def scored(softcap: float = 0.0, slopes: Tensor | None = None) -> Score | None:
    """flash-attn's `softcap` (0: none) and `alibi_slopes` ((heads,) or (batch, heads)); None: the scaled product."""
    cap = SoftCap(softcap) if softcap else None
    bias = None if slopes is None else ALiBi(slopes)
    return cap | bias if cap is not None and bias is not None else cap or bias


def placed(deterministic: bool) -> str | Backend:
    """Where to run for flash-attn's `deterministic`, which speaks of gradients; False leaves it to torch's switch."""
    return Backend(deterministic=True) if deterministic else "auto"


def _window(window: Any) -> tuple[int | None, int | None]:
    pair = tuple(window) if isinstance(window, Sequence) else ()
    if len(pair) != 2 or not all(x is None or (isinstance(x, int) and not isinstance(x, bool)) for x in pair):
        raise AttentionError(f"window_size is {window!r}; it must be a pair of ints (left, right), -1 meaning no limit")
    left, right = (None if x is None or x < 0 else x for x in pair)
    return left, right
