"""transformers' mask function: turns its mask functions and padding tensors into a `Mask`.

transformers builds masks from functions that it nests: `and_masks(sliding_window_overlay(1024), causal_mask_function)`.
We recognise its own functions by name and read their closures, so that they become masks with a span. Every other
function (a model's own) is evaluated by transformers and becomes `Materialized`.

Its positions are q_offset + row and kv_offset + column; ours count the given keys, the last row at the last key:

    dynamic cache   keys  k k k k k q q        the rows end at the last key; nothing to do
    static cache    keys  k k k k k q q . .    `room` unused slots after them: `BeforeRoom` moves the rows to the left

With a static cache, `generate` makes the mask and gives it to the model as `attention_mask`, which passes it to the
mask function again: `ForwardMask` has the tensor attributes that this path reads.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from warpattn.errors import AttentionError
from warpattn.language.expr import load
from warpattn.masks import (
    Causal,
    CustomMask,
    Document,
    Full,
    Lengths,
    Mask,
    Materialized,
    Padding,
    SlidingWindow,
    Span,
)

Value = Any  # a symbol, a number or a tensor
NO_TENSOR = "this model makes its own attention of it: use attn_implementation='sdpa' or 'eager', or pass a 4-D tensor"


def build_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,  # int, or a tensor of one
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> ForwardMask:
    """Make the `Mask` of one forward pass.

    `attention_mask` is bool (batch, keys seen so far), True for real tokens; `kv_offset` among the options is the
    position of the first key. A static cache gives its position as a tensor, so that nothing is read back from a GPU.
    """
    if isinstance(attention_mask, ForwardMask):
        return attention_mask
    kv_offset = options.get("kv_offset", 0)
    mask = recognise(mask_function, kv_offset)
    if mask is None:
        return _materialized(batch_size, (q_length, kv_length), q_offset, mask_function, attention_mask, options)
    room = kv_offset + kv_length - q_length - q_offset
    if mask != Full() and (isinstance(room, Tensor) or room != 0):
        device = options.get("device", "cpu")
        steps = room.reshape(1) if isinstance(room, Tensor) else torch.tensor([room], device="cpu")
        mask = BeforeRoom(mask, steps.to(device, torch.int32))
    if attention_mask is None:
        return ForwardMask(mask)
    missing = kv_offset + kv_length - attention_mask.shape[1]
    real = pad(attention_mask, (0, max(0, missing)))[:, kv_offset : kv_offset + kv_length]
    return ForwardMask(_joined([mask, padding_mask(real)]))


def recognise(function: Callable, kv_offset: int = 0) -> Mask | None:
    """Return the mask of a mask function of transformers, in key positions; None for any other function."""
    if function is causal_mask_function:
        return Causal()
    if function is bidirectional_mask_function:
        return Full()
    if getattr(function, "__module__", "") != causal_mask_function.__module__:
        return None
    maker = function.__qualname__.partition(".<locals>.")[0]
    held = dict(
        zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()), strict=True)
    )
    match maker, held:
        case "and_masks", {"mask_functions": functions}:
            parts = [recognise(part, kv_offset) for part in functions]
            return None if any(part is None for part in parts) else _joined(parts)
        case "sliding_window_overlay", {"sliding_window": window}:
            return SlidingWindow(window, right=None)
        case "sliding_window_bidirectional_overlay", {"sliding_window": window}:
            return SlidingWindow(window + 1, right=window)
        case "chunked_overlay", {"chunk_size": size, "left_padding": starts}:
            return _chunked(size, starts - kv_offset)
        case "packed_sequence_mask_function", {"packed_sequence_mask": ids}:
            return Document(ids, runs=True)  # they count the sequences
        case "remap_positions_for_packed_sequence", {"mask_function": inner}:
            # It gets positions in a sequence, not in the batch: the same if only their difference counts.
            mask = recognise(inner, kv_offset)
            return mask if isinstance(mask, Causal | Full | SlidingWindow) else None
    return None


def padding_mask(real: Tensor) -> Mask:
    """Make the mask of a bool (batch, keys) tensor, True for tokens. Reads back two bools, unless compiling."""
    if not torch.compiler.is_compiling():
        lengths = real.sum(dim=1, dtype=torch.int32)
        at_front = torch.arange(real.shape[1], device=real.device) < lengths[:, None]
        everything, in_order = torch.stack((real.all(), (at_front == real).all())).tolist()
        if everything:
            return Full()
        if in_order:
            return Padding(lengths)
    return RealTokens(real)


class NoTensorError(AttentionError, AttributeError):
    """Raised if a model's own code uses the mask of a forward pass as a tensor."""


@dataclass(frozen=True)
class ForwardMask(Mask):
    """`mask` with the tensor attributes that transformers reads: a number of dimensions, contiguity."""

    mask: Mask
    ndim: ClassVar[int] = 4

    def contiguous(self) -> ForwardMask:
        """Return itself."""
        return self

    def __getattr__(self, name: str) -> NoReturn:
        if hasattr(Tensor, name):
            raise NoTensorError(f"the mask's {name} is read; {NO_TENSOR}")
        raise AttributeError(f"a ForwardMask has no attribute {name}", name=name, obj=self)

    def _refuse(self, _: object) -> NoReturn:
        raise NoTensorError(f"the mask is used in arithmetic or cut into parts; {NO_TENSOR}")

    __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse

    def keep(self, b: Value, h: Value, q: Value, k: Value, lens: Lengths | None = None) -> Value:
        return self.mask.keep(b, h, q, k, lens)

    def kv_span(self, b: Value, h: Value, q_lo: Value, q_hi: Value, lens: Lengths) -> Span:
        return self.mask.kv_span(b, h, q_lo, q_hi, lens)


@dataclass(frozen=True, eq=False)
class RealTokens(Mask):
    """real[b, k], for padding anywhere. real: bool [B, K].

    The span goes from a row's first token to its last; without padding in between, all of it is visible.
    """

    real: Tensor
    _bounds: Tensor = field(init=False, repr=False)  # [B, 3]: first token, one past the last, end of the full part

    def __post_init__(self) -> None:
        position = torch.arange(self.real.shape[1], device=self.real.device)
        first = torch.where(self.real, position, self.real.shape[1]).amin(1)
        last = torch.where(self.real, position + 1, 0).amax(1)
        full = torch.where(self.real.sum(1) == last - first, last, first)
        object.__setattr__(self, "_bounds", torch.stack((first, last, full), 1).to(torch.int32))

    def keep(self, b: Value, h: Value, q: Value, k: Value, lens: Lengths | None = None) -> Value:
        return load(self.real, b, k)

    def kv_span(self, b: Value, h: Value, q_lo: Value, q_hi: Value, lens: Lengths) -> Span:
        first, last, full = (load(self._bounds, b, column) for column in range(3))
        return Span(first, first, full, last)


@dataclass(frozen=True, eq=False)
class BeforeRoom(Mask):
    """`mask`, for rows that end `room` keys before the last one; room: int32 [1]. `mask` reads no lengths."""

    mask: Mask
    room: Tensor

    def keep(self, b: Value, h: Value, q: Value, k: Value, lens: Lengths | None = None) -> Value:
        return self.mask.keep(b, h, q - load(self.room, 0), k, lens)

    def kv_span(self, b: Value, h: Value, q_lo: Value, q_hi: Value, lens: Lengths) -> Span:
        room = load(self.room, 0)
        return self.mask.kv_span(b, h, q_lo - room, q_hi - room, lens)


def _chunked(size: int, starts: Tensor) -> Mask:
    """Make the mask of chunks of `size` counted from starts[b]; the window bounds the keys of a chunk."""
    own = CustomMask(lambda b, h, q, k, start: (k - start[b]) // size == (q - start[b]) // size, start=starts)
    return own & SlidingWindow(size, right=size - 1)


def _joined(parts: list[Mask | None]) -> Mask:
    """Join `parts` by &, without those that hide nothing; a window and `Causal` become one mask."""
    masks = [part for part in parts if part is not None and part != Full()]
    windows = [part for part in masks if isinstance(part, SlidingWindow) and part.right is None]
    if Causal() in masks and len(windows) == 1:
        masks = [SlidingWindow(windows[0].window)] + [part for part in masks if part not in (windows[0], Causal())]
    return functools.reduce(operator.and_, masks) if masks else Full()


def _materialized(
    batch_size: int,
    lengths: tuple[int, int],
    q_offset: Any,
    mask_function: Callable,
    attention_mask: Tensor | None,
    options: dict[str, Any],
) -> ForwardMask:
    """Make the mask tensor that transformers would have passed to torch's attention."""
    options = options | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    full = sdpa_mask(
        batch_size, *lengths, q_offset, mask_function=mask_function, attention_mask=attention_mask, **options
    )
    assert full is not None  # it may be skipped only where that is allowed
    return ForwardMask(Materialized(full))
