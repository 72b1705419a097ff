"""The launches of a call, kept: with other tensors of the same shapes only addresses are written again.

    Repeat(steps, ready, operands, sequence) ─ loaded, bound ─▶ repeat(addresses, values): a driver call a step

Which parameter holds which tensor is seen once, by identity, in the arguments of the steps. Workspaces belong to the
`Repeat`, so it must not run twice at a time: keep one per stream. The tensors of the call are not kept.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from warpattn import cuda, hip
from warpattn.abi import values as flattened
from warpattn.dispatch import Bound, load
from warpattn.operands import Operands
from warpattn.problem import Ready
from warpattn.sequences import Sequence as Layout
from warpattn.step import Step, TensorMap

__all__ = ["Repeat", "tensors_of"]


def tensors_of(x: Operands, sequence: Layout) -> tuple[Tensor | None, ...]:
    """The tensors of a call in the order of `Repeat`'s addresses: the operands, then the sequence's indices."""
    return (*x, *sequence.indices().values())


class Repeat:
    """The bound launches of one call."""

    def __init__(self, launches: tuple[Step, ...], ready: Ready, x: Operands, sequence: Layout) -> None:
        """`launches` are the steps of the call, whose operands must be `fitted`.

        LookupError if a tensor of the call cannot be told from the others.
        """
        named = tensors_of(x, sequence)
        given = [tensor for tensor in named if tensor is not None]
        if len({id(tensor) for tensor in given}) < len(given):
            raise LookupError("a tensor stands for two")
        self._device = x.q.get_device()
        self._lock = threading.Lock()
        self._addresses: tuple[int, ...] = ()
        self._bound: list[tuple[Bound, tuple[int, ...]]] = []
        self._cells: list[tuple[int, Any]] = []  # (which tensor, its cell)
        self._maps: list[tuple[int, int]] = []  # (which tensor, address of its map)
        self._captured: list[tuple[int, Any]] = []  # (which value, its cell)
        self._workspace: list[Tensor] = []
        place = {id(tensor): i for i, tensor in enumerate(named) if tensor is not None}
        first = {"mask_args": 0, "score_args": sum(1 + 2 * tensor.ndim for tensor in ready.mask.tensors)}
        for step in launches:
            if step.arch in hip.ARCHS:
                raise LookupError("launches through HIP are not kept")
            bound = load(step, self._device).bind(step.args)
            self._bound.append((bound, step.grid))
            self._watch(bound, flattened(bound.kernel.parameters, step.args), place, first)
        watched = {i for i, _ in (*self._cells, *self._maps)}
        if watched != set(place.values()):
            raise LookupError("a tensor was copied")

    def _watch(self, bound: Bound, args: Sequence[Any], place: dict[int, int], first: dict[str, int]) -> None:
        """Note where the call's tensors, and the values of captured ones, stand among a kernel's parameters."""
        for parameter, value in zip(bound.kernel.parameters, args, strict=True):
            root, _, number = parameter.name.partition(".")
            if root in first:
                self._captured.append((first[root] + int(number), bound.cell(parameter.name)))
                continue
            tensor = value.tensor if isinstance(value, TensorMap) else value
            index = place.get(id(tensor)) if isinstance(tensor, Tensor) else None
            if index is not None and parameter.kind == "map":
                self._maps.append((index, bound.map_address(parameter.name)))
            elif index is not None:
                self._cells.append((index, bound.cell(parameter.name)))
            elif isinstance(tensor, Tensor):
                self._workspace.append(tensor)

    def __call__(self, addresses: tuple[int, ...], values: Sequence[int]) -> None:
        """Launch on torch's current stream of the device, which must be the current one.

        addresses: of `tensors_of` the call, 0 for None; values: of the captured tensors, `launcher.captured_values`.
        """
        with self._lock:
            if addresses != self._addresses:
                self._addresses = ()
                replace = cuda.replace_address_call()
                code = 0
                for index, target in self._maps:
                    code |= replace(target, addresses[index])
                if code:
                    cuda.check(code, "cuTensorMapReplaceAddress")
                for index, cell in self._cells:
                    cell.value = addresses[index]
                self._addresses = addresses
            if values:
                for index, cell in self._captured:
                    cell.value = values[index]
            stream = cuda.current_stream(self._device)
            for bound, grid in self._bound:
                bound.launch(grid, stream)

