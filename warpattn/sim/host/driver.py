"""A Triton driver for a simulated chip, with the functions that Triton and its users call."""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from ..compile import ARCHS, block_bytes
from ..errors import SimulationError

_PROCESSORS = {"sm90": 132, "sm100": 148, "sm103": 148, "gfx942": 304, "gfx950": 256}  # of one card
_REGISTERS = 65_536
_GENERATION = {"sm90": (9, 0), "sm100": (10, 0), "sm103": (10, 3), "gfx942": (9, 4), "gfx950": (9, 5)}


class SimulatedDriver:
    """The active driver inside `launches`. No launch reaches it: `launches` intercepts them."""

    def __init__(self, arch: str) -> None:
        from triton.backends.compiler import GPUTarget

        self.arch, self.target = arch, GPUTarget(*ARCHS[arch])
        self.utils = _Utilities(arch)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> str:
        """The key of Triton's caches for this chip."""
        return f"simulated {self.arch}"

    def set_current_device(self, device: Any) -> None:
        """Do nothing: there is one device."""

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return _GENERATION[self.arch]

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        """Return the device for timing by `triton.testing`: events are far apart, so that it runs a function once."""
        return SimpleNamespace(Event=Event, synchronize=lambda: None, current_device=lambda: 0)

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return torch.empty(1, dtype=torch.int32, device="cpu")

    def clear_cache(self, cache: torch.Tensor) -> None:
        """Do nothing: no cache is simulated."""

    def get_benchmarker(self) -> Callable[..., Any]:
        """Return a benchmarker that times nothing, so autotuners take the first configuration."""
        return lambda call, quantiles=None, **_: untimed(quantiles)

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., Any]:
        def refuse(*_: Any) -> None:
            raise SimulationError("a compiled kernel was launched by itself; the simulator runs kernel[grid](…)")

        return refuse


class Event:
    """An event without a time."""

    def __init__(self, **_: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 1e9


class _Utilities:
    """The driver's functions for devices and binaries."""

    def __init__(self, arch: str) -> None:
        self.arch = arch

    def get_device_properties(self, device: Any = None) -> dict[str, int]:
        lanes = ARCHS[self.arch][2]
        return {
            "max_shared_mem": block_bytes(self.arch), "max_num_regs": _REGISTERS,
            "multiprocessor_count": _PROCESSORS[self.arch], "warpSize": lanes,
            "sm_clock_rate": 1, "mem_clock_rate": 1, "mem_bus_width": 1,
        }  # fmt: skip

    def load_binary(self, name: str, binary: bytes, shared: int, device: Any) -> tuple[Any, Any, int, int, int]:
        """Return (module, function, registers, spills, most threads) of machine code without loading it."""
        registers = nvidia_registers(binary) if self.arch.startswith("sm") else amd_registers(binary)
        return None, None, registers, 0, 1024

    def unload_module(self, module: Any) -> None:
        """Do nothing: nothing was loaded."""


def nvidia_registers(binary: bytes) -> int:
    """Return the registers per thread of a cubin."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return max(int(found) for found in re.findall(r"REG:(\d+)", text))


def amd_registers(binary: bytes) -> int:
    """Return the most registers of a lane; a kernel's own count is only in its text, not in its binary."""
    return 512


def untimed(quantiles: Any = None) -> Any:
    """Return a benchmark's result without a time."""
    return [math.nan] * len(quantiles) if quantiles else math.nan
