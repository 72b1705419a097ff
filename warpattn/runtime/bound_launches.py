"""Launches whose kernel parameters stay in memory, so that launching them on other tensors only writes addresses.

    Launch ─ load ─▶ LoadedKernel ─ BoundLaunch ─▶ parameters at fixed addresses ─ launch(stream) ─▶ one driver call
    BoundLaunches(launches)          the launches of one call, in order
      .launch()                      on the tensors that they were made of
      .follow(tensors, …)            find the parameters that hold each tensor of the call, by identity
      (addresses, values)            launch on other tensors of the same shapes and strides

A kernel with a dynamic tile scheduler needs a counter in device memory that is 0 before every launch and that no other
launch uses meanwhile: one per stream, and one per stream of each capture (tile_counters.py). Workspaces belong to the
`BoundLaunches`, so one with a workspace must not run twice at the same time: keep one per stream.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from warpattn.errors import AttentionError
from warpattn.problem import CheckedCall
from warpattn.problem.arch import RUNS
from warpattn.problem.backends import chip_of
from warpattn.problem.element import BYTES_OF
from warpattn.problem.launch import Launch, TensorMap
from warpattn.problem.operands import MAX_INDEX, Operands
from warpattn.runtime import compiler, cuda, hip, kernel_cache
from warpattn.runtime.kernel_cache import Artifact
from warpattn.runtime.kernel_parameters import SCRATCH, Parameter
from warpattn.runtime.tile_counters import TileCounters
from warpattn.sequences import Sequence as Layout

Tensors = Sequence[Tensor | None]
CAPTURED = ("mask_args", "score_args")  # parameters for tensors that mask and score captured


@dataclass(frozen=True)
class LoadedKernel:
    """A compiled kernel on one device."""

    function: int
    threads: int
    shared: int
    parameters: tuple[Parameter, ...]
    kinds: tuple[str, ...]  # of the values passed to the driver; a map is followed by its extents and strides
    first: tuple[int, ...]  # for each parameter the index of its first value
    ctas: int = 1  # CTAs of a cluster; its size is in the machine code

    @classmethod
    def of(cls, made: Artifact, function: int, ctas: int) -> LoadedKernel:
        """Describe an artifact whose machine code is loaded on a device as `function`."""
        counts = [_kinds(parameter) for parameter in made.parameters]
        kinds = [kind for listed in counts for kind in listed]
        first = tuple(accumulate([len(listed) for listed in counts], initial=0))[:-1]
        return cls(function, made.threads, made.shared, made.parameters, (*kinds, *SCRATCH), first, ctas)


def _kinds(parameter: Parameter) -> tuple[str, ...]:
    rank = len(parameter.box)
    return ("map", *["i32"] * rank, *["i64"] * rank) if parameter.kind == "map" else (parameter.kind,)


def driver_of(arch: str) -> Any:
    """Return the driver module of an architecture, `cuda` or `hip`, which have the same functions."""
    return hip if arch in hip.ARCHS else cuda


_loaded: dict[Hashable, LoadedKernel] = {}  # never emptied: modules stay for as long as the process lives
_loading = threading.Lock()


def load(launch: Launch, device: int) -> LoadedKernel:
    """Return the kernel of a launch, loaded on a device, which must be the current one."""
    driver = driver_of(launch.arch)
    driver.bind_context(device)  # this thread may never have used CUDA
    key = (device, launch.name, launch.arch, launch.key)
    kernel = _loaded.get(key)
    if kernel is None:
        target = _target(launch.arch)
        made = kernel_cache.find((launch.name, target, launch.key), partial(compiler.artifact_of, launch, target))
        with _loading:
            kernel = _loaded.get(key)
            if kernel is None:
                function = driver.load_function(made.cubin, made.entry, made.shared)
                ctas = int(str(launch.options.get("num_ctas", 1)))
                kernel = _loaded[key] = LoadedKernel.of(made, function, ctas)
    return kernel


def _target(arch: str) -> str:
    """Return the chip to compile for: the current device's own name if it runs another chip's kernels."""
    return (arch in RUNS.values() and chip_of(torch.device("cuda")).target) or arch


def argument(args: Mapping[str, Any], name: str) -> Any:
    """Find a parameter's value in a launch's arguments: `shape.seq_q` is a tuple's field, `args.0` its first part."""
    root, *path = name.split(".")
    value = args[root]
    for part in path:
        value = value[int(part)] if part.isdigit() else getattr(value, part)
    return value


class BoundLaunch:
    """A loaded kernel with the arguments of one launch. To be launched by one thread at a time."""

    def __init__(self, launch: Launch, device: int) -> None:
        if launch.tile_counter is not None and not launch.persistent:
            raise ValueError(f"{launch.name} has a tile counter, but every tile needs a program of its own")
        if launch.together > 1:
            _check_together(launch, processors(device))
        self.kernel = kernel = load(launch, device)
        self.name, self.per_step = launch.name, launch.per_step
        self.arguments = [argument(launch.args, parameter.name) for parameter in kernel.parameters]
        driver = driver_of(launch.arch)
        self._memory = driver.Parameters(kernel.kinds)
        self._first = {parameter.name: i for parameter, i in zip(kernel.parameters, kernel.first, strict=True)}
        for parameter, value in zip(kernel.parameters, self.arguments, strict=True):
            self._write(self._first[parameter.name], parameter, value, launch.l2_promotion)
        x, y, z = (*launch.grid, 1, 1)[:3]
        self.tile_counter = launch.tile_counter
        size = ((x * kernel.ctas, y, z), kernel.threads, kernel.shared)
        self.call = driver.launch_call(kernel.function, *size, self._memory.table, pdl=launch.pdl)

    def _write(self, index: int, parameter: Parameter, value: Any, promotion: int) -> None:
        cells = self._memory.cells
        if parameter.kind == "map":
            tensor = value.tensor if isinstance(value, TensorMap) else value
            shape, strides = (value.shape, value.strides) if isinstance(value, TensorMap) else _extent(value)
            if isinstance(value, TensorMap) and value.copied:
                parameter = replace(parameter, box=value.copied)
            layout_of(shape, strides, parameter, promotion).encode(self.map_address(parameter.name), tensor.data_ptr())
            for cell, number in zip(cells[index + 1 :], (*[min(n, MAX_INDEX) for n in shape], *strides), strict=False):
                cell.value = number
        elif parameter.kind == "ptr":
            cells[index].value = 0 if value is None else value.data_ptr()
        else:
            cells[index].value = value

    def map_address(self, name: str) -> int:
        """Return the address of the tensor map `name`."""
        return self._memory.addresses[self._first[name]]

    def takes(self, name: str) -> bool:
        """Whether the kernel has the parameter `name`."""
        return name in self._first

    def cell(self, name: str) -> Any:
        """The ctypes cell of a scalar or pointer; write its `value` between launches."""
        return self._memory.cells[self._first[name]]


class BoundLaunches:
    """The bound launches of one call."""

    def __init__(self, launches: Sequence[Launch], device: int) -> None:
        """Load and bind every launch; `device` must be the current one."""
        self.device = device
        self._driver = driver_of(launches[0].arch)
        self.each = [BoundLaunch(launch, device) for launch in launches]
        self.calls = [bound.call for bound in self.each]  # what is launched
        self._counters = tile_counters(device)
        self._counter_cells = [bound.cell(bound.tile_counter) for bound in self.each if bound.tile_counter]
        self._lock = threading.Lock()
        self._addresses: tuple[int, ...] = ()  # of the followed tensors, as the parameters hold them now
        self._cells: list[tuple[int, Any]] = []  # (which tensor, its cell)
        self._maps: list[tuple[int, int]] = []  # (which tensor, address of its map)
        self._captured: list[tuple[int, Any]] = []  # (which value, its cell)
        self.workspace: list[Tensor] = []  # with one, the launches must not run twice at the same time

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the workspace, each tensor counted once."""
        return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in self.workspace}.values())

    def cells(self, name: str) -> list[Any]:
        """Return the cells of the scalar `name` in all launches that take it."""
        return [bound.cell(name) for bound in self.each if bound.takes(name)]

    def follow(self, tensors: Tensors, mask_values: int = 0, either: Tensors = ()) -> None:
        """Find which parameters hold the tensors of a call, so that it can be repeated on others.

        mask_values: how many of the captured tensors' values are the mask's. either: those of which one is enough.
        Raises LookupError if one tensor is given for two, or if the launches use a copy. The tensors are not kept.
        """
        given = [tensor for tensor in tensors if tensor is not None]
        index_of = {id(tensor): i for i, tensor in enumerate(tensors) if tensor is not None}
        if len(index_of) < len(given):
            raise LookupError("one tensor is given for two")
        first = dict(zip(CAPTURED, (0, mask_values), strict=True))
        for bound in self.each:
            for parameter, value in zip(bound.kernel.parameters, bound.arguments, strict=True):
                root, _, number = parameter.name.partition(".")
                if root in first:
                    self._captured.append((first[root] + int(number), bound.cell(parameter.name)))
                    continue
                tensor = value.tensor if isinstance(value, TensorMap) else value
                index = index_of.get(id(tensor)) if isinstance(tensor, Tensor) else None
                if index is not None and parameter.kind == "map":
                    self._maps.append((index, bound.map_address(parameter.name)))
                elif index is not None:
                    self._cells.append((index, bound.cell(parameter.name)))
                elif isinstance(tensor, Tensor) and parameter.name != bound.tile_counter:
                    self.workspace.append(tensor)
            bound.arguments = []
        read = {i for i, _ in (*self._cells, *self._maps)}
        spare = {index_of[id(tensor)] for tensor in either if tensor is not None}
        if set(index_of.values()) - read - (spare if read & spare else set()):
            raise LookupError("a tensor was copied")
        self._addresses = tuple([0 if x is None else x.data_ptr() for x in tensors])

    def follow_call(self, checked: CheckedCall, x: Operands, sequence: Layout) -> None:
        """Follow the tensors of an attention call: its operands, then those of the sequence."""
        mask_values = sum([1 + 2 * tensor.ndim for tensor in checked.mask.tensors])
        self.follow((*x, *sequence.indices().values()), mask_values, (x.v, sequence.v_transposed))

    def launch(self) -> None:
        """Launch on torch's current stream of the device, which must be the current one."""
        stream = cuda.current_stream(self.device)
        kept = None
        for cell in self._counter_cells:
            if cuda.is_capturing():
                cell.value, kept = self._counters.of_capture(cuda.capture_of(stream), stream)
            else:
                cell.value = self._counters.by_stream.get(stream) or self._counters.of_stream(stream)
        for call in self.calls:
            code = call(stream)
            if code:
                self._launch_again(call, stream, code)
        del kept  # a counter of a graph's own memory must live until its launch is recorded

    def __call__(self, addresses: tuple[int, ...], captured: Sequence[int]) -> None:
        """Launch on other tensors.

        addresses: of the followed tensors, 0 for None; captured: `captured_values` of the tensors of mask and score.
        """
        with self._lock:
            if addresses != self._addresses:
                self._readdress(addresses)
            for index, cell in self._captured:
                cell.value = captured[index]
            self.launch()

    def _readdress(self, addresses: tuple[int, ...]) -> None:
        old = self._addresses
        moved = [(index, target) for index, target in self._maps if addresses[index] != old[index]]
        if moved:
            replace = cuda.replace_address_call()
            for index, target in moved:
                code = replace(target, addresses[index])
                if code:
                    self._addresses = (-1,) * len(addresses)  # unknown: everything is written again
                    cuda.check(code, "cuTensorMapReplaceAddress")
        for index, cell in self._cells:
            cell.value = addresses[index]
        self._addresses = addresses

    def _launch_again(self, call: Any, stream: int, code: int) -> None:
        """Handle a failed launch: give a thread without a context one and launch once more; else raise."""
        if code == cuda.INVALID_CONTEXT:
            self._driver.bind_context(self.device)
            code = call(stream)
        names = ", ".join(bound.name for bound in self.each)
        self._driver.check(code, f"launch of {names}")


def _check_together(launch: Launch, most: int) -> None:
    """Raise AttentionError if a device, such as a part of a card, runs too few programs at once."""
    if launch.together > most:
        what = f"{launch.together} programs wait for each other, and this device runs {most} at once"
        raise AttentionError(f"{launch.name}: {what}; gradients that are not deterministic do not wait")


def launch_all(launches: Sequence[Launch], device: int) -> BoundLaunches:
    """Launch on torch's current stream of a device, which must be the current one; return the bound launches."""
    bound = BoundLaunches(launches, device)
    bound.launch()
    return bound


def _extent(x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides for a tensor map; a dimension of one element gets a stride that maps accept."""
    packed = 16 * -(-x.shape[-1] // 16)
    return tuple(x.shape), tuple([s if n > 1 else packed for n, s in zip(x.shape, x.stride(), strict=True)])


def layout_of(
    shape: tuple[int, ...], strides: tuple[int, ...], parameter: Parameter, promotion: int
) -> cuda.TensorMapLayout:
    """Return the tensor map of a tensor with the parameter's box, whose rows are at most as long as its swizzle."""
    *outer, columns = parameter.box
    swizzle = parameter.swizzle
    size = BYTES_OF[parameter.dtype]
    box = (*outer, min(columns, swizzle // size) if swizzle else columns)
    in_bytes = tuple([size * s for s in strides[:-1]])
    return cuda.TensorMapLayout(parameter.dtype, shape, in_bytes, box, swizzle, promotion)


@cache
def tile_counters(device: int) -> TileCounters:
    """The tile counters of a device."""
    return TileCounters(torch.device("cuda", device))


@cache
def processors(device: int) -> int:
    """Number of SMs of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count
