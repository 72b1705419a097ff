"""Maps torch's CUDA names to the CPU, so that programs with tensors on "cuda" run unchanged inside `launches`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from ..errors import SimulationError
from .driver import Event, SimulatedDriver

_IS_CUDA = torch.Tensor.is_cuda.__get__  # pyright: ignore[reportAttributeAccessIssue]


class CudaIsCpu(TorchFunctionMode):
    """Keeps tensors on the CPU that a program makes on, or moves to, a card."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func == _IS_CUDA:  # another object each time
            return True
        if func is torch.device:  # a device may be named; what is made on it is made on the CPU
            return func(*args, **kwargs or {})
        given = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        return func(*map(_on_cpu, args), **given)


# Functions of torch.cuda: those about memory in use, and those without a result.
_MEMORY = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
_NOTHING = ("reset_peak_memory_stats", "reset_max_memory_allocated", "manual_seed", "manual_seed_all", "set_stream")


class _Stream:
    """A stream: launches run one after the other, so it orders nothing."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def synchronize(self, *_: Any) -> None:
        pass

    wait_stream = wait_event = synchronize

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _no_graph(*_: Any, **__: Any) -> None:
    raise SimulationError("CUDA graphs are not simulated; launch the kernels themselves")


def _on_cpu(value: Any) -> Any:
    named = isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))
    there = isinstance(value, torch.device) and value.type == "cuda"
    return torch.device("cpu") if named or there else value


@contextmanager
def cuda_on_cpu(driver: SimulatedDriver) -> Iterator[None]:
    """Let torch.cuda act as if the simulated chip were there."""
    found = driver.utils.get_device_properties()
    major, minor = driver.get_device_capability()
    properties = SimpleNamespace(
        name=f"simulated {driver.arch}", major=major, minor=minor, multi_processor_count=found["multiprocessor_count"],
        shared_memory_per_block_optin=found["max_shared_mem"], warp_size=found["warpSize"], total_memory=0,
    )  # fmt: skip
    answers = {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
        "synchronize": lambda device=None: None, "empty_cache": lambda: None, "set_device": lambda device: None,
        "get_device_capability": lambda device=None: (major, minor),
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "Stream": _Stream, "current_stream": _Stream, "default_stream": _Stream, "Event": Event,
        "stream": lambda stream: nullcontext(), "device": lambda device: nullcontext(), "CUDAGraph": _no_graph,
        **dict.fromkeys(_MEMORY, lambda device=None: 0), "mem_get_info": lambda device=None: (0, 0),
        **dict.fromkeys(_NOTHING, lambda *_: None),
    }  # fmt: skip
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        default = torch.set_default_device
        stack.enter_context(mock.patch.object(torch, "set_default_device", lambda device: default(_on_cpu(device))))
        stack.enter_context(CudaIsCpu())
        yield
