"""The masks: a small class each, with `keep` for one pair and `kv_span` for the key range of a tile of rows.

q counts in key positions (see `masks.base`): the last query sits at the last key. Expressions combine q with k as late
as possible: a part of q alone or k alone costs a kernel one operation per row or key instead of one per score.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from warpattn.inputs import is_tensor, kind_of
from warpattn.language.expr import Expr, load, maximum, minimum, saturated, user_result_error, where
from warpattn.language.functions import OfFunction
from warpattn.language.open_sizes import settled
from warpattn.language.traced import Lengths, require, same_object, settle, whole
from warpattn.language.user_code import call_user
from warpattn.masks.base import Mask
from warpattn.masks.documents import document_bounds, document_labels, run_labels
from warpattn.masks.program import Span
from warpattn.scores import Score, broadcast_index, captured_values

Value = Any  # a symbol, a number or a tensor


@dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key."""

    def keep(self, b: Value, h: Value, q: Value, k: Value, lens: Lengths | None = None) -> Value:
        return True

    def kv_span(self, b: Value, h: Value, q_lo: Value, q_hi: Value, lens: Lengths) -> Span:
        return Span(0, 0, lens.k, lens.k)


@dataclass(frozen=True)
class Causal(Mask):
    """k <= q: the last query sees every key. top_left=True aligns the first query with the first key instead."""

    top_left: bool = False

    def __post_init__(self) -> None:
        require(isinstance(self.top_left, bool), f"top_left is {kind_of(self.top_left)}", "it must be True or False")

    def keep(self, b: Value, h: Value, q: Value, k: Value, lens: Lengths | None = None) -> Value:
        return k <= self._newest(q, lens)

    def kv_span(self, b: Value, h: Value, q_lo: Value, q_hi: Value, lens: Lengths) -> Span:
        return Span(0, 0, self._newest(q_lo, lens) + 1, self._newest(q_hi, lens) + 1)

    def _newest(self, q: Value, lens: Lengths | None) -> Value:
        return q - (lens.k - lens.q) if self.top_left and lens is not None else q


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """Keys from q - window + 1 to q + right: `window` keys counting the query's own, `right` newer ones.

    None means no limit on that side. FlashAttention's (left, right) is SlidingWindow(left + 1, right).
    """

    window: int | None
    right: int | None = 0

    def __post_init__(self) -> None:
        for name, value, low in (("window", self.window, 1), ("right", self.right, 0)):
            found = None if value is None else whole(value, low)
            ok = value is None or found is not None
            require(ok, f"{name} is {kind_of(value)}", f"it must be None or an int from {low} to 2**30")
            settle(self, name, found)

    def keep(self, b: Value, h: Value, q: Value, k: Value, lens: Lengths | None = None) -> Value:
        new_enough = True if self.window is None else k > q - self.window
        return new_enough & (True if self.right is None else k <= q + self.right)

    def kv_span(self, b: Value, h: Value, q_lo: Value, q_hi: Value, lens: Lengths) -> Span:
        first, full_lo = (0, 0) if self.window is None else (q_lo - self.window + 1, q_hi - self.window + 1)
        full_hi, last = (lens.k, lens.k) if self.right is None else (q_lo + self.right + 1, q_hi + self.right + 1)
        return Span(first, full_lo, full_hi, last)


@dataclass(frozen=True)
class Chunked(Mask):
    """q // size == k // size: positions see their own chunk (Llama 4 takes it `& Causal()`)."""

    size: int

    def __post_init__(self) -> None:
        size = whole(self.size, 1)
        require(size is not None, f"size is {kind_of(self.size)}", "it must be an int from 1 to 2**30")
        settle(self, "size", size)

    def keep(self, b: Value, h: Value, q: Value, k: Value, lens: Lengths | None = None) -> Value:
        return q // self.size == k // self.size

    def kv_span(self, b: Value, h: Value, q_lo: Value, q_hi: Value, lens: Lengths) -> Span:
        oldest, newest = q_lo // self.size, q_hi // self.size
        first, last = oldest * self.size, newest * self.size + self.size
        return Span(first, newest * self.size, oldest * self.size + self.size, last)  # no full part if rows span chunks


@dataclass(frozen=True, eq=False)
class Padding(Mask):
    """k < valid_lengths[b]: keys past the valid length are hidden. valid_lengths: int32 or int64 tensor [B]."""

    valid_lengths: Tensor

    def __post_init__(self) -> None:
        require(_is_int_tensor(self.valid_lengths, 1), f"valid_lengths is {kind_of(self.valid_lengths)}",
                "it must be an int32 or int64 tensor (batch,)")  # fmt: skip

    def keep(self, b: Value, h: Value, q: Value, k: Value, lens: Lengths | None = None) -> Value:
        return k < saturated(load(self.valid_lengths, b))

    def kv_span(self, b: Value, h: Value, q_lo: Value, q_hi: Value, lens: Lengths) -> Span:
        length = saturated(load(self.valid_lengths, b))
        return Span(0, 0, length, length)


@dataclass(frozen=True)
class Prefix(Mask):
    """k <= q or k < length: a prefix that all see, causal after it. length: int, or int32/int64 tensor [B]."""

    length: int | Tensor = field(compare=False)
    _length: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not _is_int_tensor(self.length, 1):
            length = whole(self.length, 0)
            require(length is not None, f"length is {kind_of(self.length)}",
                    "it must be an int from 0 to 2**30 or an int32 or int64 tensor (batch,)")  # fmt: skip
            settle(self, "length", length)
        object.__setattr__(self, "_length", same_object(self.length))

    def keep(self, b: Value, h: Value, q: Value, k: Value, lens: Lengths | None = None) -> Value:
        return k < maximum(q + 1, self._at(b))

    def kv_span(self, b: Value, h: Value, q_lo: Value, q_hi: Value, lens: Lengths) -> Span:
        return Span(0, 0, maximum(q_lo + 1, self._at(b)), maximum(q_hi + 1, self._at(b)))

    def _at(self, b: Value) -> Value:
        return saturated(load(self.length, b)) if isinstance(self.length, Tensor) else self.length


@dataclass(frozen=True, eq=False)
class Document(Mask):
    """ids[b, q] == ids[b, k]: packed documents see only themselves. ids: int tensor [S] or [B, S] over key positions.

    Positions outside the ids see nothing and are not seen. Ids may repeat after a gap, which makes spans wider. With
    `runs` each run of equal ids is its own document, and kernels read two numbers a query instead of an id a key.
    Spans are prepared once, on the ids' device: make a new Document when ids change, rather than writing into them.
    """

    ids: Tensor
    runs: bool = False
    _labels: Tensor = field(init=False, repr=False)  # ids renumbered from 1, so that reads outside match none
    _bounds: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        require(_is_int_tensor(self.ids, 1, 2), f"ids is {kind_of(self.ids)}",
                "it must be an int32 or int64 tensor (seq,) or (batch, seq)")  # fmt: skip
        require(isinstance(self.runs, bool), f"runs is {kind_of(self.runs)}", "it must be True or False")
        labels = run_labels(self.ids) if self.runs else document_labels(self.ids)
        object.__setattr__(self, "_labels", labels)
        object.__setattr__(self, "_bounds", document_bounds(labels))

    def keep(self, b: Value, h: Value, q: Value, k: Value, lens: Lengths | None = None) -> Value:
        if self.runs:
            start = self.ids.shape[-1] - self._read(self._bounds, b, q, 2)  # outside the ids: their end
            return (k >= start) & (k < self._read(self._bounds, b, q, 3))
        mine = self._read(self._labels, b, q)
        return where(mine > 0, mine, -1) == self._read(self._labels, b, k)

    def kv_span(self, b: Value, h: Value, q_lo: Value, q_hi: Value, lens: Lengths) -> Span:
        size, bounds = self.ids.shape[-1], self._bounds
        newest = minimum(q_hi, lens.k - 1)  # rows after it do not exist
        first = self._read(bounds, b, maximum(q_lo, 0), 0)
        last = self._read(bounds, b, minimum(newest, size - 1), 1)
        full_lo = size - self._read(bounds, b, newest, 2)  # outside the ids: size, which leaves no full part
        return Span(first, full_lo, self._read(bounds, b, q_lo, 3), last)

    def _read(self, table: Tensor, b: Value, position: Value, *column: int) -> Value:
        return load(table, *column, *((b,) if self.ids.ndim == 2 else ()), position)


@dataclass(frozen=True, eq=False)
class Materialized(Mask):
    """A mask given as a tensor [B, S, K] or [B, H, S, K], dimensions of size 1 broadcast.

    Bool: True is visible. Float: added to the score after every score function, its -inf hides; it cannot be part of
    `|` or `~`, and gradients reach it. The tensor is aligned bottom-right with its own sizes:
    query position q reads row q - (K - S). Outside the tensor everything is hidden.
    """

    mask: Tensor

    def __post_init__(self) -> None:
        mask = self.mask
        fits = is_tensor(mask) and mask.ndim in (3, 4) and (mask.dtype == torch.bool or self.adds)
        require(fits, f"mask is {kind_of(mask)}", "it must be a bool or float tensor (B, S, K) or (B, H, S, K)")

    @property
    def adds(self) -> bool:
        """Whether the tensor is added to the scores."""
        return self.mask.is_floating_point()

    def keep(self, b: Value, h: Value, q: Value, k: Value, lens: Lengths | None = None) -> Value:
        value = self.value(b, h, q, k, lens)
        if not self.adds:
            return value
        rows, keys = self.mask.shape[-2:]
        row = self._row(q, lens)
        inside_rows = True if rows == 1 else (row >= 0) & (row < rows)
        return inside_rows & (True if keys == 1 else k < keys) & (value != -torch.inf)

    def kv_span(self, b: Value, h: Value, q_lo: Value, q_hi: Value, lens: Lengths) -> Span:
        keys = self.mask.shape[-1]
        return Span(0, 0, 0, lens.k if keys == 1 else keys)

    def additive(self) -> Score | None:
        return _AddMask(self) if self.adds else None

    def value(self, b: Value, h: Value, q: Value, k: Value, lens: Lengths | None = None) -> Value:
        """The tensor's element; 0 (False) outside."""
        index = (b, self._row(q, lens), k) if self.mask.ndim == 3 else (b, h, self._row(q, lens), k)
        return load(self.mask, *broadcast_index(self.mask.shape, index))

    def _row(self, q: Value, lens: Lengths | None) -> Value:
        rows, keys = self.mask.shape[-2:]
        if keys == 1:
            return q if lens is None else q - (lens.k - rows)
        return q - (keys - rows)


@dataclass(frozen=True)
class _AddMask(Score):
    """s + mask: the additive part of a Materialized mask."""

    mask: Materialized

    def apply(self, s: Value, b: Value, h: Value, q: Value, k: Value, lens: Lengths | None = None) -> Value:
        return s + self.mask.value(b, h, q, k, lens)


@dataclass(frozen=True, init=False, eq=False)
class CustomMask(OfFunction, Mask):
    """fn(b, h, q, k, **captured) -> bool, a Python function that serves the reference and the kernels unchanged.

    The indices are ints; q counts in key positions: row + (len_k - len_q). Captured values and the operations that the
    function may use are those of `CustomScore`. Its span is all keys; combine it by `&` with a mask that bounds them.
    """

    fn: Callable[..., Any]
    captured: tuple[tuple[str, Any], ...]

    def __init__(self, fn: Callable[..., Any], **captured: Any) -> None:
        object.__setattr__(self, "fn", settled(fn, "CustomMask"))
        object.__setattr__(self, "captured", captured_values("CustomMask", fn, captured))

    def keep(self, b: Value, h: Value, q: Value, k: Value, lens: Lengths | None = None) -> Value:
        result = call_user(self.fn, b, h, q, k, **dict(self.captured))
        symbolic = isinstance(result, bool) or (isinstance(result, Expr) and result.dtype == "bool")
        eager = isinstance(result, Tensor) and not isinstance(k, Expr) and result.dtype == torch.bool
        if not (symbolic or eager):
            raise user_result_error(self.fn, result, "a mask function must return a bool, such as a comparison")
        return result


def _is_int_tensor(value: Any, *ranks: int) -> bool:
    return is_tensor(value) and value.dtype in (torch.int32, torch.int64) and value.ndim in ranks
