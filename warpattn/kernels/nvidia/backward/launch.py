"""The launches of a backward call, with every argument by name: for packed sequences the list of key tiles; then
prepare, the main kernel, and finish. With PDL, the last two start when the preceding one ends, without launch latency.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from warpattn.problem import Problem
from warpattn.problem.arch import ARCHS, Arch, compile_options
from warpattn.problem.backends import card_target
from warpattn.problem.backward import CheckedBackward, Gradients
from warpattn.problem.launch import Choice, Launch
from warpattn.problem.operands import modifier_args, programs
from warpattn.sequences import Dense, Ragged, Sequence

from ..arguments import strided
from ..clipped_map import clipped_map
from .arguments import (
    ROWS,
    Added,
    BackwardPrograms,
    BackwardShape,
    DeviceCode,
    Prepared,
    RowShape,
    Sequences,
    Statistics,
    Turns,
)
from .order import padded_rows

OPTIONS = compile_options()
DENSE = Dense()


@dataclass(frozen=True)
class BackwardKernels:
    """An architecture's part of the backward. choose(problem, chip, deterministic) gives the configuration. device_code
    imports Triton, so it is called only where a kernel is compiled."""

    arch: str
    choose: Callable[[Problem, Arch, bool], Choice]
    device_code: Callable[[], DeviceCode]


@dataclass(frozen=True, eq=False)
class BackwardCall:
    """The values that all launches of a call share."""

    checked: CheckedBackward
    x: Gradients
    choice: Choice
    kernels: BackwardKernels
    made: Prepared
    sequences: Sequences
    shape: RowShape

    @property
    def arch(self) -> str:
        return self.kernels.arch

    @property
    def row_grid(self) -> tuple[int, int]:
        """Grid of the kernels before and after the main one."""
        return self.shape.padded_q // ROWS, self.made.shift.shape[0]


def backward_launches(
    kernels: BackwardKernels, checked: CheckedBackward, x: Gradients, sequence: Sequence = DENSE,
    choice: Choice | None = None,
) -> tuple[Launch, ...]:  # fmt: skip
    """The launches of a dense or ragged backward call, with the given `choice` or the planner's.

    `x` is `fitted_gradients`, and has queries and keys (`without_tiles` is for the rest).
    """
    if choice is None:
        target = card_target(x.q.device, kernels.arch) or ARCHS[kernels.arch]
        choice = kernels.choose(checked.forward.problem, target, checked.deterministic)
    call = _call(checked, x, sequence, choice, kernels)
    launches = (_prepare(call), _main(call), _finish(call))
    return (_key_tiles(call), *launches) if choice.config.ragged else launches


def _call(
    checked: CheckedBackward, x: Gradients, sequence: Sequence, choice: Choice, kernels: BackwardKernels
) -> BackwardCall:
    """Workspace and sizes of a call."""
    problem = checked.forward.problem
    ragged, padded_q = choice.config.ragged, padded_rows(problem)
    heads = problem.heads_q * (1 if ragged else problem.batch)
    sums = heads * choice.config.dq_copies
    made = Prepared(
        shift=_empty(x, heads, padded_q),
        delta=_empty(x, heads, padded_q),
        dq=_empty(x, sums, padded_q, problem.dim_qk),
        dsinks=None if x.dsinks is None else _empty(x, heads, padded_q // ROWS),
        turns=_empty(x, sums, padded_q // ROWS).view(torch.int32) if choice.config.counted else None,
    )
    sequences = Sequences(None, None, None)
    if isinstance(sequence, Ragged):
        cu_q = sequence.cu_q.contiguous()
        cu_k = cu_q if sequence.cu_k is None else sequence.cu_k.contiguous()
        tiles = torch.empty(2 * (1 + choice.order.tiles), dtype=torch.int32, device=x.q.device)
        sequences = Sequences(cu_q, cu_k, tiles)
    shape = RowShape(problem.batch, problem.seq_q, padded_q, problem.heads_q)
    return BackwardCall(checked, x, choice, kernels, made, sequences, shape)


def _key_tiles(call: BackwardCall) -> Launch:
    """Launch that writes `sequences.tiles`."""
    config, sequences = call.choice.config, call.sequences
    order = call.choice.order
    args = {
        "cu_k": sequences.cu_k, "tiles": sequences.tiles, "batch": call.shape.batch, "section": order.section,
        "at_once": order.at_once,
    }  # fmt: skip

    def source():
        from .signature import key_tiles_source  # imports Triton

        return key_tiles_source(args, config)

    return Launch(f"{call.arch}.backward_key_tiles", call.arch, (config,), source, OPTIONS, (call.shape.batch,), args)


def _prepare(call: BackwardCall) -> Launch:
    """Launch that writes `made`."""
    x, config, forward = call.x, call.choice.config, call.checked.forward
    has_dlse, has_sinks = x.dlse is not None, x.dsinks is not None
    args = {
        "out": strided(x.out), "dout": strided(x.dout), "statistics": Statistics(x.lse, x.dlse, x.sinks),
        "made": call.made, "cu_q": call.sequences.cu_q, "shape": call.shape,
        "unit": 1 / forward.scale if programs(forward)[1] is None else 1.0,
    }  # fmt: skip

    def source():
        from .signature import prepare_source  # imports Triton

        return prepare_source(args, config, has_dlse, has_sinks)

    key = (config, has_dlse, has_sinks)
    return Launch(f"{call.arch}.backward_prepare", call.arch, key, source, OPTIONS, call.row_grid, args)


def _main(call: BackwardCall) -> Launch:
    """Launch that writes dk and dv, and adds to `made.dq`."""
    checked, choice, made = call.checked, call.choice, call.made
    problem, config = checked.forward.problem, choice.config
    modifiers = BackwardPrograms(*programs(checked.forward), checked.slope)
    qk, v = config.box(config.padded_qk), config.box(config.padded_v)
    reads = {"q": (config.block_m, qk), "k": (config.rows, qk), "v": (config.rows, v), "dout": (config.block_m, v)}
    writes = {"dk": (config.rows, qk), "dv": (config.rows, v)}
    group, order = problem.heads_q // problem.heads_kv, choice.order
    sizes = (problem.seq_q, problem.seq_k, problem.heads_q, group, problem.heads_kv)
    args = {
        "reads": tuple(_boxes(call, name, *box) for name, box in reads.items()),
        "writes": (*(_boxes(call, name, *box) for name, box in writes.items()), made.dq),
        "numbers": (made.shift, made.delta), "sequences": call.sequences, "scale": checked.forward.scale,
        "turns": Turns(made.turns, call.shape.padded_q // ROWS), "counter": torch.zeros(1, dtype=torch.int32),
        "shape": BackwardShape(*sizes, order.tiles, order.section, order.heads, order.lap, order.lap_rows),
        **modifier_args(checked.forward),
    }  # fmt: skip

    def source():
        from .signature import backward_source  # imports Triton

        return backward_source(args, config, modifiers, call.arch, call.kernels.device_code())

    key = (config, *(None if program is None else program.key for program in modifiers))
    together = order.tiles if config.deterministic and config.rotate else 1
    return Launch(
        f"{call.arch}.backward", call.arch, key, source, OPTIONS, choice.grid, args,
        persistent=together if config.persistent else 0, pdl=True,
        tile_counter="counter" if config.persistent else None, l2_promotion=256, together=together,
    )  # fmt: skip


def _finish(call: BackwardCall) -> Launch:
    """Launch that writes dq and dsinks from `made`."""
    x, config = call.x, call.choice.config
    has_sinks = x.dsinks is not None
    args = {
        "dq": strided(x.dq), "sums": Added(call.made.dq, call.made.dsinks, call.made.turns), "dsinks": x.dsinks,
        "cu_q": call.sequences.cu_q, "scale": call.checked.forward.scale, "shape": call.shape,
    }  # fmt: skip

    def source():
        from .signature import finish_source  # imports Triton

        return finish_source(args, config, has_sinks)

    name, key = f"{call.arch}.backward_finish", (config, has_sinks)
    return Launch(name, call.arch, key, source, OPTIONS, call.row_grid, args, pdl=True)


def _boxes(call: BackwardCall, name: str, rows: int, cols: int) -> Any:
    """The kernel's argument for a tensor that TMA copies in boxes of `rows` x `cols`."""
    x, config = getattr(call.x, name), call.choice.config
    return clipped_map(name, x, rows, cols) if config.ragged else x


def _empty(x: Gradients, *sizes: int) -> Tensor:
    return torch.empty(sizes, dtype=torch.float32, device=x.q.device)
