"""The few HIP calls a launch on an AMD card needs, through ctypes; what `cuda.py` is for NVIDIA, with the same names.

    library(): libamdhip64, the copy that torch has loaded
    code object ─ load_function ─▶ handle ─ launch_call ─▶ hipModuleLaunchKernel

A kernel's arguments are packed in one block of memory, each at a multiple of its size. The code object states the same
layout in its metadata; `check_layout` compares the two whenever a kernel is compiled.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

ARCHS = ("gfx942", "gfx950")
WAVE = 64
_SIZES = {"ptr": 8, "i64": 8, "i32": 4, "f32": 4}
_CTYPES = {"ptr": ctypes.c_uint64, "i64": ctypes.c_int64, "i32": ctypes.c_int32, "f32": ctypes.c_float}
_CAPTURE_RELAXED = 2  # hipStreamCaptureModeRelaxed
_BUFFER_POINTER, _BUFFER_SIZE, _END = 1, 2, 3  # HIP_LAUNCH_PARAM_BUFFER_POINTER, _BUFFER_SIZE, _END
_NAMES = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6")
_STATED = re.compile(r"\.offset:\s+(\d+)\s+\.size:\s+(\d+)\s+\.value_kind:\s+(\w+)")


@cache
def library() -> ctypes.CDLL:
    """Load HIP's library: the copy that is mapped already, else torch's own, else the system's."""
    found = next(filter(None, map(_opened, _candidates())), None)
    if found is None:
        raise RuntimeError("libamdhip64.so could not be loaded: a torch built for ROCm brings it, this one was not")
    return found


def _opened(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def _candidates() -> Iterable[str]:
    maps = Path("/proc/self/maps")
    own = sorted(Path(torch.__path__[0], "lib").glob("libamdhip64.so*"))
    return [*_mapped(maps.read_text() if maps.exists() else ""), *map(str, own), *_NAMES]


def _mapped(maps: str) -> list[str]:
    """Return the paths of HIP's library in a process's table of mapped files."""
    return list(dict.fromkeys(re.findall(r"(/\S*libamdhip64\.so\S*)$", maps, re.MULTILINE)))


def check(code: int, call: str) -> None:
    """Raise if a HIP call failed, with the name and text of the error."""
    if code != 0:
        name, words = (_text(which, code) for which in ("hipGetErrorName", "hipGetErrorString"))
        raise RuntimeError(f"{call} failed with HIP error {code}, {name}: {words}")


def _text(call: str, code: int) -> str:
    function = getattr(library(), call)
    function.restype, function.argtypes = ctypes.c_char_p, [ctypes.c_int]
    return (function(code) or b"unknown error").decode()


class Argument(NamedTuple):
    """The place of one kernel argument in the packed block, in bytes."""

    offset: int
    size: int


def layout(kinds: Sequence[str]) -> tuple[Argument, ...]:
    """Lay out arguments one after the other, each at a multiple of its size."""
    found, end = [], 0
    for kind in kinds:
        size = _SIZES[kind]
        start = -(-end // size) * size
        found.append(Argument(start, size))
        end = start + size
    return tuple(found)


def stated_layout(amdgcn: str) -> tuple[Argument, ...]:
    """The arguments that a kernel's metadata lists, without those that the runtime adds (`hidden_…`)."""
    listed = _STATED.findall(amdgcn.partition(".amdgpu_metadata")[2])
    return tuple(Argument(int(at), int(size)) for at, size, kind in listed if not kind.startswith("hidden"))


class Parameters:
    """Kernel arguments at fixed addresses, packed; `cells[i].value` may be rewritten between launches."""

    def __init__(self, kinds: Sequence[str]) -> None:
        """`kinds` in kernel order: "ptr", "i64", "i32" or "f32"."""
        places = layout(kinds)
        size = places[-1].offset + places[-1].size if places else 0
        self._memory = ctypes.create_string_buffer(size + WAVE)
        start = ctypes.addressof(self._memory) + WAVE - 1 & -WAVE
        self._size = ctypes.c_size_t(size)
        self.addresses = [start + place.offset for place in places]
        self.cells = [_CTYPES[kind].from_address(at) for kind, at in zip(kinds, self.addresses, strict=True)]
        self.table = (ctypes.c_void_p * 5)(_BUFFER_POINTER, start, _BUFFER_SIZE, ctypes.addressof(self._size), _END)


def launch_call(
    function: int, grid: tuple[int, int, int], threads: int, shared: int, table: Any, *, pdl: bool = False
) -> Callable[[int], int]:
    """As `cuda.launch_call`, with `Parameters.table`; AMD has no programmatic dependent launch."""
    assert not pdl
    call = library().hipModuleLaunchKernel
    call.argtypes = [ctypes.c_void_p] + [ctypes.c_uint] * 7 + [ctypes.c_void_p] * 3
    call.restype = ctypes.c_int

    def launch(stream: int) -> int:
        return call(function, *grid, threads, 1, 1, shared, stream, None, table)

    return launch


def bind_context(device: int) -> None:
    """Do nothing: in HIP every thread has a context on its current device."""


@contextmanager
def relaxed_captures() -> Iterator[None]:
    """Let this thread allocate and wait, too, while it captures a stream."""
    mode, exchange = ctypes.c_int(_CAPTURE_RELAXED), library().hipThreadExchangeStreamCaptureMode
    check(exchange(ctypes.byref(mode)), "hipThreadExchangeStreamCaptureMode")
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


def load_function(code: bytes, name: str, shared: int) -> int:
    """Load kernel `name` on the current device; return its handle. HIP need not know `shared`, its bytes of LDS.

    The module stays loaded, and loading is allowed while a stream is being captured, as in `cuda.load_function`.
    """
    module, function, hip = ctypes.c_void_p(), ctypes.c_void_p(), library()
    with relaxed_captures():
        check(hip.hipModuleLoadData(ctypes.byref(module), code), "hipModuleLoadData")
        check(hip.hipModuleGetFunction(ctypes.byref(function), module, name.encode()), "hipModuleGetFunction")
    if function.value is None:
        raise RuntimeError(f"kernel {name} has no entry in its module")
    return function.value


def check_layout(kinds: Sequence[str], amdgcn: str, name: str) -> None:
    """Raise RuntimeError unless `layout` puts arguments of these kinds where kernel `name` expects them."""
    ours, stated = layout(kinds), stated_layout(amdgcn)
    if ours != stated:
        raise RuntimeError(f"kernel {name} takes its arguments at {stated}, but they would be written to {ours}")
