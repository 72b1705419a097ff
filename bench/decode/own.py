"""warpattn in `bench.decode`: one plan for all layers, as it is made or with other fields of its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

import warpattn as wa
from bench.decode.cases import Inputs
from bench.peers.adapter import Call
from warpattn.kernels.sm90.decode.choice import choose, most_stages, schedule_of
from warpattn.kernels.sm90.decode.config import with_fields
from warpattn.kernels.sm90.decode.launch import list_launches
from warpattn.kernels.sm90.mla import config as mla
from warpattn.kernels.sm90.mla import launch as mla_launch
from warpattn.problem import Call as Asked
from warpattn.problem import Problem, is_latent, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.launch import Choice, PlanOptions
from warpattn.problem.operands import Operands
from warpattn.runtime.bound_launches import BoundLaunches
from warpattn.sequences import Dense, PagedKV
from warpattn.sequences import Sequence as Layout


def own_calls(layers: Sequence[Inputs], fields: dict[str, int]) -> list[Call]:
    """The decode kernel with `fields` of its configuration set ("schedule.unit" is one of a value in it), planned once
    for all layers, as a `DecodePlan` is; on a CPU the public call."""
    first = layers[0]
    if first.q.device.type == "cpu":
        return [public_call(x) for x in layers]
    sequence = sequence_of(first)
    ready = validate(Asked(first.q, first.k, first.v, sequence, backend="reference"), read_values=False)
    fields = dict(fields)
    grid = fields.pop("grid", 0)
    terms = PlanOptions(bool(fields.pop("invariant", 0)), bool(fields.pop("settled", 0)))
    swap_ab = fields.pop("swap_ab", None)
    choice = choice_of(ready.problem, fields.pop("ctas", None), terms, None if swap_ab is None else bool(swap_ab))
    choice = over(choice, ready.problem, grid) if grid else choice
    config = with_fields(choice.config, fields)
    config = replace(config, stages=most_stages(config)) if "block_n" in fields and "stages" not in fields else config
    out = first.q.new_empty((*first.q.shape[:-1], first.v.shape[-1]))
    operands = Operands(first.q, first.k, first.v, out, None, None)
    launches = mla_launch.list_launches if is_latent(ready.problem) else list_launches
    steps = launches(ready, operands, sequence, replace(choice, config=config))
    repeat = BoundLaunches(steps, first.q.get_device())
    repeat.follow_call(ready, operands, sequence)

    def call(x: Inputs) -> Tensor:
        indices = sequence_of(x).indices().values()
        repeat((*(t.data_ptr() for t in (x.q, x.k, x.v, out)), 0, 0, *(t.data_ptr() for t in indices)), ())
        return out

    return [partial(call, x) for x in layers]


def choice_of(problem: Problem, ctas: int | None, options: PlanOptions, swap_ab: bool | None) -> Choice:
    """The choice of the decode kernel, with `ctas` blocks an SM, or of the one for latent attention, whose queries are
    the right operands if `swap_ab`; None: where the plan has them."""
    if is_latent(problem):
        return mla.choose(problem, ARCHS["sm90"], options=options, swap_ab=swap_ab)
    return choose(problem, ARCHS["sm90"], ctas=ctas, options=options)


def over(choice: Choice, problem: Problem, grid: int) -> Choice:
    """The choice over `grid` CTAs, with the schedule of their work queues."""
    schedule = schedule_of(problem, choice.config.schedule, grid)
    return replace(choice, config=replace(choice.config, schedule=schedule), grid=(grid,))


def sequence_of(x: Inputs) -> Layout:
    """How the sequences lie in the keys."""
    if x.table is None:
        return Dense(x.scale, x.scale)
    return PagedKV(x.k, x.v, x.table, x.lengths, k_scale=x.scale, v_scale=x.scale)


def public_call(x: Inputs) -> Call:
    """`attention` or `attention_paged`."""
    sequence = sequence_of(x)
    if isinstance(sequence, PagedKV):
        return lambda: wa.attention_paged(x.q, sequence)
    k, v = (x.k, x.v) if x.scale is None else (wa.Quantized(x.k, x.scale), wa.Quantized(x.v, x.scale))
    return lambda: wa.attention(x.q, k, v)
