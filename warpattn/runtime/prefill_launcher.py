"""Parameters of the Hopper prefill kernel for one plan and one set of strides, rewritten in place at every launch."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch import Tensor

from warpattn.kernels.sm90.prefill.config import SM90Config
from warpattn.kernels.sm90.prefill.launch import Shape
from warpattn.runtime import cuda

_MAPS = 4  # q, k, v, o
MAX_INDEX = 2**31 - 1
_MAP_KINDS = ("map", *["i32"] * 4, *["i64"] * 4)
_LSE, _SINKS, _COUNTER, _SCALE, _SHAPE = range(_MAPS * len(_MAP_KINDS), _MAPS * len(_MAP_KINDS) + 5)


def swizzle_bytes(cols: int) -> int:
    """Swizzle of a two-byte tile of `cols` columns, as `layouts.tile_layout` chooses it."""
    return min(128, 2 * cols)


def tensor_map(tensor: Tensor, rows: int, cols: int, dtype: str) -> cuda.TensorMapLayout:
    """Map of a (batch, seq, heads, dim) tensor in boxes of (1, rows, 1, cols); a box row is at most 128 bytes."""
    shape = tuple(tensor.shape)
    packed = 16 * -(-shape[3] // 8)
    strides = tuple(2 * s if n > 1 else packed for s, n in zip(tensor.stride()[:3], shape[:3], strict=True))
    swizzle = swizzle_bytes(cols)
    return cuda.TensorMapLayout(dtype, shape, strides, (1, rows, 1, swizzle // 2), swizzle)


def captured_values(tensors: Sequence[Tensor]) -> list[int]:
    """Values of captured tensors, in the order of `build.tensor_signature`: address, sizes, strides of each.

    Indices have 32 bits, so a longer dimension is as good as one of 2**31 - 1.
    """
    values: list[int] = []
    for tensor in tensors:
        values.append(tensor.data_ptr())
        values += [min(size, MAX_INDEX) for size in tensor.shape]
        values += tensor.stride()
    return values


class PrefillLauncher:
    """Launches one compiled kernel on tensors of one shape and stride; safe to share between threads."""

    def __init__(self, function: int, threads: int, shared: int, grid: int, ranks: Sequence[int]) -> None:
        """`ranks`: of the captured tensors, mask's then score's."""
        captured = [kind for rank in ranks for kind in ("ptr", *["i32"] * rank, *["i64"] * rank)]
        kinds = [*_MAP_KINDS * _MAPS, "ptr", "ptr", "ptr", "f32", *["i32"] * 7, *captured, "ptr", "ptr"]
        self._parameters = cuda.Parameters(kinds)
        cells = self._parameters.cells
        self._lse, self._sinks, self._counter, self._scale = (cells[i] for i in (_LSE, _SINKS, _COUNTER, _SCALE))
        self._captured = cells[_SHAPE + 7 : len(cells) - 2]
        self._lock = threading.Lock()
        self._maps = [self._parameters.address(i * len(_MAP_KINDS)) for i in range(_MAPS)]
        self._addresses: tuple[int, ...] = ()  # what the maps hold
        self._launch = cuda.launch_call(function, (grid, 1, 1), threads, shared, self._parameters.table)
        self._replace = cuda.replace_address_call()

    def describe(self, tensors: Sequence[Tensor], config: SM90Config, shape: Shape) -> None:
        """Encode the tensor maps of q, k, v, o and the problem's integers."""
        boxes = (
            (config.rows, config.padded_qk),
            (config.block_n, config.padded_qk),
            (config.block_n, config.padded_v),
            (config.rows, config.store_cols),
        )
        for i, (tensor, (rows, cols)) in enumerate(zip(tensors, boxes, strict=True)):
            tensor_map(tensor, rows, cols, config.dtype).encode(self._maps[i], tensor.data_ptr())
        for i, value in enumerate(shape.values()):
            self._parameters.set(_SHAPE + i, value)

    def __call__(
        self, q: int, k: int, v: int, o: int, extra: Sequence[int], scale: float, captured: Sequence[int], stream: int
    ) -> None:
        """Launch on `stream` with data pointers; `extra` is (lse, sinks, counter), `captured` from captured_values."""
        addresses = (q, k, v, o)
        with self._lock:
            code = 0
            if addresses != self._addresses:
                self._addresses = ()
                replace = self._replace
                for target, address in zip(self._maps, addresses, strict=True):
                    code |= replace(target, address)
                if code == 0:
                    self._addresses = addresses
            self._lse.value, self._sinks.value, self._counter.value = extra
            self._scale.value = scale
            if captured:
                for cell, value in zip(self._captured, captured, strict=True):
                    cell.value = value
            code |= self._launch(stream)
            if code == cuda.INVALID_CONTEXT:
                cuda.bind_context(cuda.current_device())
                code = self._launch(stream)
        if code:
            cuda.check(code, "launch of the sm_90 prefill kernel")
