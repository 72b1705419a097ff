"""From a checked call to the GPU: plan, compiled kernel, tensor maps, launch.

    run(ready, operands) -> prepare: plan, artifact (memory, disk, compiler), tensor maps   once per problem and strides
                         -> Prepared.launch: addresses and one driver call                  every time

Launches go to torch's current stream of the operands' device. Triton is imported only when a kernel has to be compiled.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Sequence
from functools import cache, lru_cache

import torch
from torch import Tensor

from warpattn.kernels.sm90.prefill.launch import prefill_code, shape_of
from warpattn.problem import CheckedCall
from warpattn.problem.operands import Operands, captured, fitted, programs, without_keys
from warpattn.runtime import cuda, execute
from warpattn.runtime.plan import Plan, plan
from warpattn.runtime.prefill_launcher import PrefillLauncher, captured_values
from warpattn.runtime.tile_counters import Counters

__all__ = ["Prepared", "launches_dense", "prepare", "run"]

PREPARED_AT_MOST = 2048

planned = lru_cache(4096)(plan)


def launches_dense(checked: CheckedCall) -> bool:
    """Whether a call runs as the dense prefill on Hopper, which this module launches; `dispatch` does the others."""
    return checked.backend == "sm90" and planned(checked.problem).kernel == "sm90.prefill"


def run(checked: CheckedCall, operands: Operands) -> None:
    """Compute `operands.out` (and `lse`) of a checked dense call on torch's current stream.

    q, k and v that TMA cannot address (`COPY_RULE` of operands.py) are copied once; such an `out` is computed aside.
    """
    problem = checked.problem
    if problem.seq_k == 0 or operands.out.numel() == 0:
        without_keys(operands)
        return
    device = operands.q.get_device()
    with contextlib.nullcontext() if cuda.current_device() == device else torch.cuda.device(device):
        fitting = fitted(operands)
        q_at, k_at, v_at, out_at, lse_at, sinks_at = (0 if x is None else x.data_ptr() for x in fitting)
        values = captured_values(captured(checked))
        prepare(checked, fitting)((q_at, k_at, v_at, out_at), (lse_at, sinks_at), values)
        if fitting.out is not operands.out:
            operands.out.copy_(fitting.out)


class Prepared:
    """A kernel with its tensor maps, ready for tensors of one set of shapes and strides on one device."""

    __slots__ = ("_counters", "_device", "_launcher", "_scale")

    def __init__(self, launcher: PrefillLauncher, device: int, scale: float) -> None:
        self._launcher, self._device, self._scale = launcher, device, scale
        self._counters = counters(device)

    def __call__(self, tensors: tuple[int, int, int, int], vectors: tuple[int, int], values: Sequence[int]) -> None:
        """Launch on torch's current stream; the device must be the current one.

        tensors: addresses of q, k, v, out; vectors: of lse and sinks, or 0; values: of the captured tensors.
        """
        stream = cuda.current_stream(self._device)
        kept = None
        if cuda.is_capturing():
            counter, kept = self._counters.of_capture()
        else:
            counter = self._counters.by_stream.get(stream) or self._counters.of_stream(stream)
        self._launcher(*tensors, (*vectors, counter), self._scale, values, stream)
        del kept


_prepared: dict[Hashable, Prepared] = {}
_preparing = threading.Lock()


def prepare(checked: CheckedCall, x: Operands) -> Prepared:
    """The prepared launch of a problem, made or found; every tensor must be `addressable`, sinks fp32."""
    device = x.q.get_device()
    key = (checked.problem, device, checked.scale, *(t.stride() for t in x[:4]))
    prepared = _prepared.get(key)
    if prepared is None:
        chosen = planned(checked.problem)
        kernel = execute.load(prefill_code(chosen.problem, chosen.choice, *programs(checked)), device)
        launcher = _launcher(chosen, kernel, x, captured(checked))
        prepared = Prepared(launcher, device, checked.scale)
        with _preparing:
            if len(_prepared) >= PREPARED_AT_MOST:
                _prepared.clear()
            _prepared[key] = prepared
    return prepared


def _launcher(chosen: Plan, kernel: execute.Loaded, x: Operands, tensors: Sequence[Tensor]) -> PrefillLauncher:
    grid = min(chosen.choice.grid[0], processors(x.q.get_device()))
    launcher = PrefillLauncher(kernel.function, kernel.threads, kernel.shared, grid, [t.ndim for t in tensors])
    launcher.describe(x[:4], chosen.choice.config, shape_of(chosen.problem, chosen.choice))
    return launcher


@cache
def counters(device: int) -> Counters:
    """Tile counters of a device."""
    return Counters(torch.device("cuda", device))


@cache
def processors(device: int) -> int:
    """Number of SMs of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count
