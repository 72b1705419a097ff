"""The few CUDA driver calls a planned launch needs, through ctypes: no compiler and no Triton at run time.

A launch costs a few microseconds because nothing is rebuilt: parameters live in one block of memory that is written in
place, and of a tensor map only the address changes. Functions raise RuntimeError with the driver's message.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch

TENSOR_MAP_BYTES = 128
INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: this thread has no context yet
_DATA_TYPES = {"fp16": 6, "fp32": 7, "bf16": 9, "fp8e4nv": 0, "fp8e5": 0}  # CUtensorMapDataType
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle by bytes
_L2_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}  # CUtensorMapL2promotion by bytes
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_CAPTURE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_CAPTURE_ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE


def _no_cuda(*_: int) -> Any:
    raise RuntimeError("this build of torch has no CUDA")


# torch's own state without its Python wrappers, which cost 0.3 us each; absent from builds without CUDA.
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _no_cuda)  # device -> handle
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", _no_cuda)
is_capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", _no_cuda)


@cache
def driver() -> ctypes.CDLL:
    """The driver library of this machine."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError("libcuda.so.1 could not be loaded: this machine has no NVIDIA driver") from error


def check(code: int, call: str) -> None:
    """Raise if a driver call failed."""
    if code != 0:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(code, ctypes.byref(text))
        words = text.value.decode() if text.value else "unknown error"
        raise RuntimeError(f"{call} failed with CUDA error {code}: {words}")


@contextmanager
def relaxed_captures() -> Iterator[None]:
    """Let this thread allocate and wait, too, while it captures a stream."""
    mode = ctypes.c_int(_CAPTURE_RELAXED)
    check(driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "cuThreadExchangeStreamCaptureMode")
    try:
        yield
    finally:
        driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def load_function(cubin: bytes, name: str, shared: int) -> int:
    """Load kernel `name` in the current context with `shared` bytes of dynamic shared memory; return its handle.
    The module stays loaded: graphs may hold the kernel for as long as the process lives."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with relaxed_captures():
        check(driver().cuModuleLoadData(ctypes.byref(module), cubin), "cuModuleLoadData")
        check(driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()), "cuModuleGetFunction")
        if shared > 48 * 1024:
            check(driver().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared), "cuFuncSetAttribute")
    if function.value is None:
        raise RuntimeError(f"kernel {name} has no entry in its module")
    return function.value


def bind_context(device: int) -> None:
    """Make the context that torch uses on `device` current in this thread, which may never have used CUDA."""
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    check(driver().cuDeviceGet(ctypes.byref(handle), device), "cuDeviceGet")
    check(driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), "cuDevicePrimaryCtxRetain")
    check(driver().cuCtxSetCurrent(context), "cuCtxSetCurrent")


def capture_of(stream: int) -> int:
    """Return the number of the capture that records a stream, unique in this process; 0 if it is unknown."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    out = (ctypes.byref(status), ctypes.byref(number), None, None, None)  # neither its graph nor its dependencies
    code = driver().cuStreamGetCaptureInfo_v2(ctypes.c_void_p(stream), *out)
    return number.value if code == 0 and status.value == _CAPTURE_ACTIVE else 0


@dataclass(frozen=True)
class TensorMapLayout:
    """A tensor map without its address: extents and byte strides, outermost first."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes, of every dimension but the last
    box: tuple[int, ...]
    swizzle: int
    promotion: int  # fewest bytes that L2 fetches

    def encode(self, target: int, address: int) -> None:
        """Write the map for a tensor at `address` to the 128 bytes at `target` (64-byte aligned)."""
        rank = len(self.shape)
        sizes = (ctypes.c_uint64 * rank)(*reversed(self.shape))
        strides = (ctypes.c_uint64 * (rank - 1))(*reversed(self.strides))
        box = (ctypes.c_uint32 * rank)(*reversed(self.box))
        steps = (ctypes.c_uint32 * rank)(*([1] * rank))
        code = driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(target), _DATA_TYPES[self.dtype], rank, ctypes.c_void_p(address), sizes, strides, box,
            steps, 0, _SWIZZLES[self.swizzle], _L2_PROMOTIONS[self.promotion], 0,
        )  # fmt: skip
        check(code, f"cuTensorMapEncodeTiled for shape {self.shape}, byte strides {self.strides}, box {self.box}")


class Parameters:
    """Kernel parameters at fixed addresses: parameter i is at `addresses[i]`; `cells[i]` sets it between launches."""

    def __init__(self, kinds: Sequence[str]) -> None:
        """`kinds` in kernel order: "map" (tensor map), "ptr" or "i64", "i32", "f32"."""
        sizes = [TENSOR_MAP_BYTES if kind == "map" else 8 for kind in kinds]
        self._memory = ctypes.create_string_buffer(sum(sizes) + 64)
        start = ctypes.addressof(self._memory) + 63 & ~63
        maps_first = [i for i, kind in enumerate(kinds) if kind == "map"]
        maps_first += [i for i, kind in enumerate(kinds) if kind != "map"]
        self.addresses = [0] * len(kinds)
        for i in maps_first:
            self.addresses[i] = start
            start += sizes[i]
        ctype = {"map": ctypes.c_uint64, "ptr": ctypes.c_uint64, "i64": ctypes.c_int64, "i32": ctypes.c_int32}
        ctype["f32"] = ctypes.c_float
        self.cells = [ctype[kind].from_address(self.addresses[i]) for i, kind in enumerate(kinds)]
        self.table = (ctypes.c_void_p * len(kinds))(*self.addresses)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, with the fields that are used."""

    _fields_: ClassVar = [("id", ctypes.c_int), ("_", ctypes.c_int), ("value", ctypes.c_int * 16)]


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_: ClassVar = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint),
    ]  # fmt: skip


def launch_call(
    function: int, grid: tuple[int, int, int], threads: int, shared: int, table: Any, *, pdl: bool = False
) -> Callable[[int], int]:
    """Return a function that launches a kernel with the parameters of `table` on a given stream and returns the
    driver's code. Only one thread at a time may call it.

    With `pdl` the kernel may start before the preceding one has ended (programmatic dependent launch); it waits for
    that end by griddepcontrol.wait.
    """
    call = driver().cuLaunchKernelEx
    call.argtypes = [ctypes.c_void_p] * 4
    call.restype = ctypes.c_int
    attribute = _Attribute(_PROGRAMMATIC_SERIALIZATION, 0, (1,))
    config = _LaunchConfig(grid, (threads, 1, 1), shared, None, ctypes.addressof(attribute), int(pdl))
    at = ctypes.addressof(config)

    def launch(stream: int, kept: object = attribute) -> int:
        config.stream = stream
        return call(at, function, table, None)

    return launch


@cache
def replace_address_call():
    """cuTensorMapReplaceAddress with its argument types declared once; it only writes memory, so it keeps the GIL."""
    call = ctypes.PyDLL(driver()._name).cuTensorMapReplaceAddress
    call.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    call.restype = ctypes.c_int
    return call
