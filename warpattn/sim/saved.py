"""Saves the memory of a launch's arguments, to run the launch again from the same bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from .arguments import PointerTable
from .memory.descriptor import TensorDescriptor


class SavedMemory:
    """The bytes of all tensors among some arguments, as they are now."""

    def __init__(self, arguments: Iterable[Any]) -> None:
        whole = {_first_byte(bytes_): bytes_ for value in arguments for bytes_ in _memories(value)}
        self._saved = [(bytes_, bytes_.copy()) for bytes_ in whole.values()]

    def restore(self) -> None:
        """Write them back."""
        for memory, saved in self._saved:
            memory[...] = saved


def _memories(value: Any) -> Iterator[np.ndarray]:
    """Yield the whole memory behind an argument as bytes, for a tuple that of each part."""
    if isinstance(value, TensorDescriptor):
        yield from _memories(value.tensor)
    elif isinstance(value, PointerTable):
        yield from _memories((*value.tensors, value.table))
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _memories(part)
    elif hasattr(value, "untyped_storage"):  # a torch tensor; this module works without torch
        storage = value.untyped_storage()
        if storage.nbytes() and value.device.type == "cpu":
            yield np.ctypeslib.as_array((ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr()))
    elif isinstance(value, np.ndarray):
        base = value
        while isinstance(base.base, np.ndarray):
            base = base.base
        if base.flags.c_contiguous and base.flags.writeable:
            yield base.reshape(-1).view(np.uint8)


def _first_byte(memory: np.ndarray) -> int:
    return memory.__array_interface__["data"][0]
