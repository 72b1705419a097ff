"""torch's names of a card, answered by the CPU: programs that put tensors on "cuda" run unchanged inside `launches`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from .driver import SimulatedDriver


class CudaIsCpu(TorchFunctionMode):
    """Tensors that a program makes on, or moves to, a card are made and stay on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        given = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        return func(*map(_on_cpu, args), **given)


def _on_cpu(value: Any) -> Any:
    named = isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))
    there = isinstance(value, torch.device) and value.type == "cuda"
    return torch.device("cpu") if named or there else value


@contextmanager
def cuda_on_cpu(driver: SimulatedDriver) -> Iterator[None]:
    """torch.cuda as if the simulated chip were there."""
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
    }  # fmt: skip
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(CudaIsCpu())
        yield
