"""Which step the lists of a `StepPlan` were made for: layers of a step attend by the same lists of query blocks."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from warpattn.runtime import cuda
from warpattn.sequences import PagedKV, Ragged


class Occasion(NamedTuple):
    """What lists were made for; a layer may read them only if all of it is the same."""

    step: object  # the caller's, compared by identity
    stream: int
    capture: int  # of a CUDA graph, which must make the lists that it reads; 0: none
    indices: tuple[int, ...]  # addresses of offsets and lengths, number of sequences
    copied: bool  # whether keys of long prompts are copied

    def same(self, other: Occasion | None) -> bool:
        return other is not None and self.step is other.step and self[1:] == other[1:]


def occasion(step: object, device: int, kv: PagedKV, seq: Ragged, copied: bool) -> Occasion | None:
    """The occasion of a call on torch's current stream; None where layers share no lists."""
    if step is None:
        return None
    stream, capturing = cuda.current_stream(device), cuda.is_capturing()
    capture = cuda.capture_of(stream) if capturing else 0
    if capturing and not capture:  # an unknown one
        return None
    indices = (seq.cu_q.data_ptr(), kv.lengths.data_ptr(), len(kv.lengths))
    return Occasion(step, stream, capture, indices, copied)


class StepLists:
    """The lists of one plan: their occasion, and the layers that have read them, by the addresses of their keys."""

    def __init__(self) -> None:
        self._made_for: Occasion | None = None
        self._layers: set[int] = set()

    def serve(self, now: Occasion | None, keys: Tensor) -> bool:
        """Whether the lists serve a layer; if not, its call makes them anew. A layer that attends again begins another
        step: engines may change lengths in place, without another object for the step."""
        layer = keys.data_ptr()
        if now is not None and now.same(self._made_for) and layer not in self._layers:
            self._layers.add(layer)
            return True
        self._made_for, self._layers = now, {layer}
        return False

    def forget(self) -> None:
        """Let the next call make the lists."""
        self._made_for = None
