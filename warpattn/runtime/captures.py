"""Memory that outlives the capture of a CUDA graph in which it is made, and memory that must not.

While a stream is captured, torch takes memory from the graph's pool, and operations only run when the graph is
replayed. So zeros would not be zeros before, and graphs of the same pool that were captured earlier may overwrite them.
torch's graph trees (`mode="reduce-overhead"`) run a function once before they record it, with memory of their pool,
too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from warpattn.runtime import cuda, hip

_TREES = "tree_manager_containers"  # where torch._inductor.cudagraph_trees keeps them, for each thread


def is_captured(device: torch.device) -> bool:
    """Whether torch's current stream of a device is being captured."""
    return device.type == "cuda" and cuda.is_capturing()


def graph_owns_memory(device: int) -> bool:
    """Whether torch takes memory that is made on a device now from the pool of a graph: nothing made now may be kept
    for later calls. `device`: its number."""
    return cuda.is_capturing() or _in_graph_trees(device)


def _in_graph_trees(device: int) -> bool:
    """Whether torch's graph trees run a function, on a stream of their own."""
    if not torch._C._is_key_in_tls(_TREES):  # asking torch for a manager would break threads that have none
        return False
    container = torch._C._get_obj_in_tls(_TREES).get(device)
    manager = None if container is None else container.tree_manager
    return manager is not None and manager.stream.cuda_stream == cuda.current_stream(device)


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
