"""Runs the steps of a call on a card: compiled code from memory, disk or the compiler, arguments, launch.

    Step ─ artifact ─▶ Loaded (on one device) ─ bind(step) ─▶ Bound: parameters in memory ─ launch ─▶ one driver call

`launch.py` is the short way for dense prefill on Hopper; everything else goes here. A `Bound` may be kept and launched
again with other addresses, which is what plans for serving do.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from warpattn.problem import CheckedCall
from warpattn.problem.arch import triton_target
from warpattn.problem.launch import Launch, TensorMap
from warpattn.problem.operands import Operands, fitted, without_keys
from warpattn.runtime import cuda, hip, kernel_cache
from warpattn.runtime.kernel_cache import Artifact
from warpattn.runtime.kernel_parameters import Parameter, parameters, values
from warpattn.runtime.plan import list_launches
from warpattn.sequences import Sequence

__all__ = ["Bound", "Loaded", "artifact", "compiled", "launch", "load", "run"]

MAX_INDEX = 2**31 - 1
STREAMED = 128  # bytes of L2 promotion: 256 made decode read 7 % slower on an H200 (bench/notes.md)


def run(checked: CheckedCall, operands: Operands, sequence: Sequence) -> None:
    """Compute `operands.out` (and `lse`) of a checked call on torch's current stream."""
    if checked.problem.seq_k == 0 or operands.out.numel() == 0:
        without_keys(operands)
        return
    device = operands.q.get_device()
    with contextlib.nullcontext() if cuda.current_device() == device else torch.cuda.device(device):
        fitting = fitted(operands)
        launch(list_launches(checked, fitting, sequence), device)
        if fitting.out is not operands.out:
            operands.out.copy_(fitting.out)


def launch(launches: tuple[Launch, ...], device: int) -> None:
    """Launch steps on torch's current stream of their device, which must be the current one."""
    for launch in launches:
        if launch.arch in hip.ARCHS:
            hip.launch(launch, device)
        else:
            load(launch, device).bind(launch).launch(cuda.current_stream(device))


@dataclass(frozen=True)
class Loaded:
    """A compiled kernel on one device."""

    function: int
    threads: int
    shared: int
    parameters: tuple[Parameter, ...]
    ctas: int = 1  # of a cluster, which the machine code asks for itself

    def bind(self, launch: Launch) -> Bound:
        """A step of this kernel with its parameters in memory."""
        return Bound(self, launch)


class Bound:
    """A kernel with its arguments, ready to launch; addresses may be replaced between launches. To be launched by one
    thread at a time."""

    def __init__(self, kernel: Loaded, launch: Launch) -> None:
        self.kernel = kernel
        kinds = [kind for parameter in kernel.parameters for kind in parameter.kinds]
        self._memory = cuda.Parameters([*kinds, "ptr", "ptr"])  # the last two are Triton's scratch memory, unused
        self._places: dict[str, int] = {}
        place = 0
        for parameter, value in zip(kernel.parameters, values(kernel.parameters, launch.args), strict=True):
            self._places[parameter.name] = place
            self._write(place, parameter, value)
            place += len(parameter.kinds)
        x, y, z = (*launch.grid, 1, 1)[:3]
        size = ((x * kernel.ctas, y, z), kernel.threads, kernel.shared)
        self._launch = cuda.launch_call(kernel.function, *size, self._memory.table, ahead=launch.ahead)

    def _write(self, place: int, parameter: Parameter, value: Any) -> None:
        if parameter.kind == "map":
            tensor = value.tensor if isinstance(value, TensorMap) else value
            shape, strides = (value.shape, value.strides) if isinstance(value, TensorMap) else _extent(value)
            layout_of(shape, strides, parameter).encode(self._memory.address(place), tensor.data_ptr())
            sizes = (min(size, MAX_INDEX) for size in shape)
            for i, number in enumerate((*sizes, *strides), start=place + 1):
                self._memory.set(i, number)
        elif parameter.kind == "ptr":
            self._memory.set(place, 0 if value is None else value.data_ptr())
        else:
            self._memory.set(place, value)

    def map_address(self, name: str) -> int:
        """Where the tensor map `name` lies."""
        return self._memory.address(self._places[name])

    def cell(self, name: str) -> Any:
        """The ctypes cell of a scalar or pointer; write its `value` between launches."""
        return self._memory.cells[self._places[name]]

    def launch(self, stream: int) -> None:
        """Launch on a stream; the kernel's device must be the current one."""
        code = self._launch(stream)
        if code == cuda.INVALID_CONTEXT:
            cuda.bind_context(cuda.current_device())
            code = self._launch(stream)
        if code:
            cuda.check(code, "kernel launch")


def _extent(x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides for a map; a dimension of one element may have any stride, so it gets one that maps take."""
    packed = 8 * -(-x.shape[-1] // 8)
    return tuple(x.shape), tuple(s if n > 1 else packed for n, s in zip(x.shape, x.stride(), strict=True))


def layout_of(shape: tuple[int, ...], strides: tuple[int, ...], parameter: Parameter) -> cuda.TensorMapLayout:
    """The map of a tensor in boxes of the parameter; a row of a box is at most as long as its swizzle."""
    *outer, columns = parameter.box
    swizzle = parameter.swizzle
    size = 4 if parameter.dtype == "fp32" else 2
    box = (*outer, min(columns, swizzle // size) if swizzle else columns)
    return cuda.TensorMapLayout(parameter.dtype, shape, tuple(size * s for s in strides[:-1]), box, swizzle, STREAMED)


_loaded: dict[Hashable, Loaded] = {}  # as many as are loaded: modules stay for as long as the process lives
_loading = threading.Lock()


def load(launch: Launch, device: int) -> Loaded:
    """The kernel of a step on a device, which must be the current one."""
    cuda.bind_context(device)  # this thread may never have used CUDA
    key = (device, launch.name, launch.key)
    kernel = _loaded.get(key)
    if kernel is None:
        made = artifact(launch)
        with _loading:
            kernel = _loaded.get(key)
            if kernel is None:
                function = cuda.load_function(made.cubin, made.entry, made.shared)
                ctas = int(str(launch.options.get("num_ctas", 1)))
                kernel = _loaded[key] = Loaded(function, made.threads, made.shared, made.parameters, ctas)
    return kernel


def artifact(launch: Launch) -> Artifact:
    """The compiled kernel of a step, from memory, disk or the compiler; needs no GPU."""

    def compile_it() -> Artifact:
        kernel = compiled(launch)
        metadata = kernel.metadata
        taken = parameters(kernel.src.signature)
        return Artifact(bytes(kernel.asm["cubin"]), metadata.name, metadata.shared, metadata.num_warps * 32, taken)

    return kernel_cache.find((launch.name, launch.arch, launch.key), compile_it)


def compiled(launch: Launch) -> Any:
    """Triton's CompiledKernel of a step, with its intermediate code and metadata; needs no GPU, always compiles."""
    kernel_cache.require_triton()
    import triton

    return triton.compile(launch.source(), target=triton_target(launch.arch), options=dict(launch.options))
