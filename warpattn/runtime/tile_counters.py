"""The tile counters of persistent kernels: int32 cells in GPU memory that are 0 between launches.

A launch leaves its counter at 0, so launches that follow each other on a stream share one. Launches that may run at the
same time must not: every stream has its own, and so has every stream of each capture into a CUDA graph, because a graph
can run beside anything but itself. A graph's cell is never used again, since nothing tells when a graph is destroyed.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

SLAB = 4096  # cells allocated at a time, 16 KiB
CAPTURES = 256  # streams of captures that are remembered, since they may still be recording


class TileCounters:
    """The counters of one device."""

    def __init__(self, device: torch.device) -> None:
        self.by_stream: dict[int, int] = {}  # address of the counter of each stream
        self._by_capture: dict[tuple[int, int], int] = {}
        self._device = device
        self._slabs: list[Tensor] = []  # never freed: graphs and streams keep the addresses
        self._free: list[int] = []
        self._lock = threading.Lock()

    def of_stream(self, stream: int) -> int:
        """Return the address of the counter of a stream that is not being captured."""
        address = self.by_stream.get(stream)
        if address is None:
            with self._lock:
                if len(self._free) <= SLAB // 2:
                    self._grow()
                address = self.by_stream.setdefault(stream, self._free.pop())
        return address

    def of_capture(self, capture: int, stream: int) -> tuple[int, Tensor | None]:
        """Return the address of the counter of a stream in a capture, and a tensor that must live until the launch is
        recorded. capture: its number, 0 if unknown: then every launch gets a cell.

        A capture cannot allocate memory that outlives its graph; when no cell is left, each launch gets a cell in the
        graph's own memory, which the graph clears first.
        """
        with self._lock:
            address = self._by_capture.get((capture, stream)) if capture else None
            if address is None and self._free:
                address = self._free.pop()
                if len(self._by_capture) >= CAPTURES:
                    self._by_capture.pop(next(iter(self._by_capture)))
                if capture:
                    self._by_capture[capture, stream] = address
        if address is not None:
            return address, None
        cell = torch.zeros(1, dtype=torch.int32, device=self._device)
        return cell.data_ptr(), cell

    def _grow(self) -> None:
        with ThreadPoolExecutor(1) as thread:  # torch may take all memory of this one from a graph's pool
            self._slabs.append(slab := thread.submit(self._zeros).result())
        self._free += range(slab.data_ptr(), slab.data_ptr() + 4 * SLAB, 4)

    def _zeros(self) -> Tensor:
        slab = torch.zeros(SLAB, dtype=torch.int32, device=self._device)
        if slab.is_cuda:
            torch.cuda.current_stream(self._device).synchronize()  # other streams will use the cells, too
        return slab
