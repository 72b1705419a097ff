"""The launches of a call, kept: with other tensors of the same shapes only addresses are written again.

    Repeat(steps, tensors) ─ loaded, bound ─▶ repeat(addresses, values): a driver call a step

Which parameter holds which tensor is seen once, by identity, in the arguments of the steps. Workspaces belong to the
`BoundLaunches`, so one that has any must not run twice at a time: keep one per stream. The tensors of the call are not
kept.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from warpattn.problem import CheckedCall
from warpattn.problem.launch import Launch, TensorMap
from warpattn.problem.operands import Operands
from warpattn.runtime import cuda, hip
from warpattn.runtime.execute import Bound, load
from warpattn.runtime.kernel_parameters import values as flattened
from warpattn.sequences import Sequence as Layout

__all__ = ["BoundLaunches"]


class BoundLaunches:
    """The bound launches of one call."""

    def __init__(self, launches: tuple[Launch, ...], tensors: Sequence[Tensor | None], mask_values: int = 0) -> None:
        """`launches` are the steps of a call on `tensors`, which must have been `fitted`, the first on the device;
        `mask_values`: how many of a captured call's values are its mask's.

        LookupError if a tensor of the call cannot be told from the others.
        """
        given = [tensor for tensor in tensors if tensor is not None]
        if len({id(tensor) for tensor in given}) < len(given):
            raise LookupError("a tensor stands for two")
        self.device = given[0].get_device()
        self._lock = threading.Lock()
        self._addresses: tuple[int, ...] = ()
        self._bound: list[Bound] = []
        self._cells: list[tuple[int, Any]] = []  # (which tensor, its cell)
        self._maps: list[tuple[int, int]] = []  # (which tensor, address of its map)
        self._captured: list[tuple[int, Any]] = []  # (which value, its cell)
        self._workspace: list[Tensor] = []
        place = {id(tensor): i for i, tensor in enumerate(tensors) if tensor is not None}
        first = {"mask_args": 0, "score_args": mask_values}
        for launch in launches:
            if launch.arch in hip.ARCHS:
                raise LookupError("launches through HIP are not kept")
            bound = load(launch, self.device).bind(launch)
            self._bound.append(bound)
            self._watch(bound, flattened(bound.kernel.parameters, launch.args), place, first)
        watched = {i for i, _ in (*self._cells, *self._maps)}
        if watched != set(place.values()):
            raise LookupError("a tensor was copied")

    @classmethod
    def of(cls, launches: tuple[Launch, ...], checked: CheckedCall, x: Operands, sequence: Layout) -> BoundLaunches:
        """The launches of an attention call; addresses are those of its operands, then of the sequence's indices."""
        mask_values = sum(1 + 2 * tensor.ndim for tensor in checked.mask.tensors)
        return cls(launches, (*x, *sequence.indices().values()), mask_values)

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

        addresses: of the call's tensors, 0 for None; values: of the captured ones, `launcher.captured_values`.
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
            stream = cuda.current_stream(self.device)
            for bound in self._bound:
                bound.launch(stream)

