"""The launches of a backward on gfx942 or gfx950, with every argument by name: dQ and numbers of the rows, then dK and
dV; and the sum of the sinks' parts where sinks have a gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpattn.problem import Problem
from warpattn.problem.arch import ARCHS, compile_options
from warpattn.problem.backward import CheckedBackward, Gradients
from warpattn.problem.launch import Choice, Launch
from warpattn.problem.operands import modifier_args, programs
from warpattn.sequences import Dense, Ragged, Sequence

from ..launch import check_longest, check_strides, check_written, indices_of, near, row_strides
from .config import (
    HELD,
    BackwardConfig,
    BackwardPrograms,
    BackwardShape,
    BackwardTraits,
    KeyResults,
    KeyStrides,
    QueryResults,
    QueryStrides,
    Reads,
    ReadStrides,
    RowNumbers,
    SideConfig,
    Statistics,
    choose,
    number_blocks,
)

DENSE = Dense()


class _Call(NamedTuple):
    """What all launches of a call share."""

    checked: CheckedBackward
    x: Gradients
    sequence: Sequence
    config: BackwardConfig
    traits: BackwardTraits
    numbers: RowNumbers

    @property
    def problem(self) -> Problem:
        return self.checked.forward.problem

    @property
    def arch(self) -> str:
        return self.config.keys.arch

    @property
    def programs(self) -> BackwardPrograms:
        return BackwardPrograms(*programs(self.checked.forward), self.checked.slope)


def list_backward_launches(
    checked: CheckedBackward, x: Gradients, sequence: Sequence = DENSE, choice: Choice | None = None
) -> tuple[Launch, ...]:
    """The launches of a dense or ragged backward call, with the planner's choice or a given one.

    `x` is `fitted_gradients`, and has queries and keys (`without_tiles` is for the rest).
    """
    problem = checked.forward.problem
    arch = checked.forward.backend.removeprefix("simulate:")
    check_longest(problem, arch)
    choice = choose(problem, ARCHS[arch]) if choice is None else choice
    traits = BackwardTraits(problem.kind, x.dlse is not None, x.dsinks is not None)
    heads = problem.heads_q * (1 if traits.ragged_queries else problem.batch)
    numbers = RowNumbers(*(_empty(x, heads, number_blocks(problem) * HELD) for _ in RowNumbers._fields))
    call = _Call(checked, x, sequence, choice.config, traits, numbers)
    queries = _queries(call)
    launches = (queries, _keys(call))
    return launches if x.dsinks is None else (*launches, _sinks(call, queries))


def _queries(call: _Call) -> Launch:
    """Write dq, the rows' numbers and the parts of the sinks' gradients."""
    x, problem, config = call.x, call.problem, call.config.queries
    check_written("dq", x.dq, HELD, call.arch)
    shape = _shape(call, problem.seq_q, "max_q", problem.heads_q)
    parts = None if x.dsinks is None else _empty(x, problem.batch, problem.heads_q, shape.m_tiles)
    out = near(x.out, HELD)
    args = _shared_args(call, config, QueryStrides(row_strides(out), row_strides(x.dq))) | {
        "out": out, "statistics": Statistics(x.lse, x.dlse, x.sinks), "numbers": call.numbers,
        "results": QueryResults(x.dq, parts), "shape": shape,
    }  # fmt: skip
    return _launch(call, "queries", args, shape.tiles)


def _keys(call: _Call) -> Launch:
    """Write dk and dv."""
    x, problem, config = call.x, call.problem, call.config.keys
    for name, gradient in (("dk", x.dk), ("dv", x.dv)):
        check_written(name, gradient, HELD, call.arch)
    shape = _shape(call, problem.seq_k, "max_k", problem.heads_kv)
    args = _shared_args(call, config, KeyStrides(row_strides(x.dk), row_strides(x.dv))) | {
        "numbers": call.numbers, "results": KeyResults(x.dk, x.dv), "shape": shape,
    }  # fmt: skip
    return _launch(call, "keys", args, shape.tiles)


def _sinks(call: _Call, queries: Launch) -> Launch:
    """Add up the parts of the sinks' gradients."""
    parts, problem = queries.args["results"].dsinks, call.problem
    args = {"parts": parts, "dsinks": call.x.dsinks, "batch": problem.batch, "heads": problem.heads_q,
            "tiles": parts.shape[-1]}  # fmt: skip

    def source() -> Any:
        from .signature import sinks_source  # imports Triton

        return sinks_source(args)

    name = f"{call.arch}.backward_sinks"
    return Launch(name, call.arch, ("sinks",), source, compile_options(), (problem.heads_q,), args)


def _launch(call: _Call, side: str, args: Mapping[str, Any], tiles: int) -> Launch:
    """The launch of one of the two kernels."""
    config: SideConfig = getattr(call.config, side)
    traits, modifiers = call.traits, call.programs

    def source() -> Any:
        from .signature import side_source  # imports Triton

        return side_source(args, config, traits, modifiers)

    key = (config, traits, *modifiers.keys)
    name, options = f"{call.arch}.backward_{side}", compile_options(config.waves)
    return Launch(name, call.arch, key, source, options, (tiles,), args)


def _shared_args(call: _Call, config: SideConfig, own: QueryStrides | KeyStrides) -> dict[str, Any]:
    """Arguments of both kernels; `own`: strides of a kernel's other tensors."""
    x = call.x
    rows, keys = config.block_m, config.block_n
    reads = Reads(near(x.q, rows), near(x.k, keys), near(x.v, keys), near(x.dout, rows))
    strides = ReadStrides(*map(row_strides, reads))
    check_strides((*strides, *own), call.arch)
    return {
        "reads": reads, "strides": strides, "own_strides": own, "indices": indices_of(call.sequence),
        "scale": call.checked.forward.scale, **modifier_args(call.checked.forward),
    }  # fmt: skip


def _shape(call: _Call, rows: int, bound: str, heads: int) -> BackwardShape:
    """The integers of a kernel that holds `rows` rows of so many heads, of a sequence at most what `bound` says."""
    problem = call.problem
    if isinstance(call.sequence, Ragged):
        most = getattr(call.sequence, bound)
        rows = rows if most is None else most
    tiles = max(1, -(-rows // HELD))
    group = problem.heads_q // problem.heads_kv
    return BackwardShape(
        problem.seq_q, problem.seq_k, problem.heads_q, problem.heads_kv, group, tiles, problem.batch * heads * tiles,
        number_blocks(problem),
    )  # fmt: skip


def _empty(x: Gradients, *sizes: int) -> Tensor:
    return torch.empty(sizes, dtype=torch.float32, device=x.q.device)
