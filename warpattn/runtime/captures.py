"""Memory that outlives the capture of a CUDA graph in which it is made.

While a stream is captured, torch takes memory from the graph's pool, and operations only run when the graph is
replayed. So zeros would not be zeros before, and graphs of the same pool that were captured earlier may overwrite them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from warpattn.runtime import cuda, hip


def is_captured(device: torch.device) -> bool:
    """Whether torch's current stream of a device is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@contextmanager
def outside_captures(device: torch.device) -> Iterator[None]:
    """Let what is made inside be made at once, in memory that no graph owns. Operations inside run beside those of the
    captured stream: they may read nothing that it writes."""
    if not is_captured(device):
        yield
        return
    beside = torch.cuda.Stream(device)
    with (hip if torch.version.hip else cuda).relaxed_captures(), torch.cuda.stream(beside):
        yield
        beside.synchronize()


def used_here(*tensors: Tensor | None) -> None:
    """Keep the memory of tensors that were made outside of a capture until what torch's current stream does with them
    has ended."""
    for x in tensors:
        if x is not None and is_captured(x.device):
            x.record_stream(torch.cuda.current_stream(x.device))
