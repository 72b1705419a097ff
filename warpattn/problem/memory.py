"""Where tensors lie in memory, whether two of them, or two elements of one, share a place, and writing there.

    extent(x)           bytes from the first element to the end of the last
    apart(...)          whether such ranges are disjoint; the cheap check of repeated calls
    begins_with(k, v)   whether v is a view of k's first columns, as in latent attention
    overlap(a, b)       exact, as NumPy solves it; tensors woven into one buffer do not overlap
    overlaps_itself(x)  whether two elements may be one place: strides that do not nest count, too
    writing(x)          a context in which torch's operations may write into x, as kernels may
    overwrite(x, ...)   copies into x in it
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from warpattn.torch_modes import is_fake

COPIED_KEYS = 128  # keys of a page of copies (kernels/sm90/copies); larger pages need none
COPIED_BYTES = 512 * 2**20  # most memory of the copies of a call; also the workspace that engines give their plans
EFFORT: Any = 100_000  # steps that NumPy may take; beyond them two tensors count as overlapping


def extent(x: Tensor) -> int:
    """Bytes from the first element to the end of the last, 0 for an empty tensor."""
    if x.numel() == 0:
        return 0
    last = sum([(size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)])
    return (last + 1) * x.element_size()


def apart(written: tuple[int, int], starts: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether the range `written` (address, bytes) is disjoint from all ranges given by `starts` and `sizes`.

    For repeated calls: it compares numbers only and reads no tensor. Where it is False, `overlap` decides.
    """
    first, size = written
    return all([start >= first + size or first >= start + read for start, read in zip(starts, sizes, strict=True)])


def has_memory(x: Tensor) -> bool:
    """Whether a tensor has an address in memory; traced, fake and transformed ones, and those on "meta", have none."""
    if type(x) is not Tensor and is_fake(x):
        return False
    try:
        x.data_ptr()
    except RuntimeError:
        return False
    return not x.is_meta


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether a byte of memory belongs to an element of `a` and to one of `b`."""
    if a.device != b.device or not (has_memory(a) and has_memory(b)):
        return False
    a_at, b_at = a.data_ptr(), b.data_ptr()
    if a_at + extent(a) <= b_at or b_at + extent(b) <= a_at or not (extent(a) and extent(b)):
        return False
    import numpy as np

    try:
        return np.shares_memory(_Places(a).array(), _Places(b).array(), max_work=EFFORT)
    except np.exceptions.TooHardError:
        return True


def begins_with(k: Tensor, v: Tensor) -> bool:
    """Whether `v` is the first columns of `k`'s own memory."""
    strides = zip(v.shape, v.stride(), k.stride(), strict=True)
    return v.data_ptr() == k.data_ptr() and all(size == 1 or mine == its for size, mine, its in strides)


def overlaps_itself(x: Tensor) -> bool:
    """Whether two elements of `x` may be one place in memory, judged by its shape and strides."""
    reach = 0
    outer = [(abs(stride), size) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
    if x.numel() == 0:
        return False
    for stride, size in sorted(outer):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def writing(x: Tensor) -> AbstractContextManager[object]:
    """A context in which torch's operations may write into `x`, as kernels may: torch itself refuses to write into
    tensors that were made in inference mode, outside of it."""
    return torch.inference_mode() if x.is_inference() and not torch.is_inference_mode_enabled() else nullcontext()


def overwrite(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy `source` into `x` and return `x`, see `writing`."""
    with writing(x):
        return x.copy_(source, non_blocking)


class _Places:
    """The addresses of a tensor's elements for NumPy, which compares them and reads nothing."""

    def __init__(self, x: Tensor) -> None:
        size = x.element_size()
        self.__array_interface__ = {
            "data": (x.data_ptr(), True),
            "typestr": f"|V{size}",
            "shape": tuple(x.shape),
            "strides": tuple([stride * size for stride in x.stride()]),
            "version": 3,
        }

    def array(self) -> Any:
        import numpy as np

        return np.asarray(self)
