"""Each synchronising operation of the other shipped forms of the Blackwell kernels: needed, or redundant with a reason.

`make test` does this for two query tiles, for one query tile whose keys are split, and for the pair of CTAs. Here are
the forms that differ in where rows come from and go to: fused heads, ragged batches, pages by boxes,
pages by rows. The combination of parts has nothing to delete: its threads do not speak to each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.oracle import poisoned
from tests.sim.knocking import knocked_out
from tests.sim.sm100.test_1q import reason as reason_1q
from tests.sim.sm100.test_knockout import reason as reason_2q
from tests.sim.sm100.test_lengths import paged, ragged
from warpattn.kernels.sm100.prefill_1q.config import choice_of, choose_1q
from warpattn.kernels.sm100.prefill_2q.config import choose_2q
from warpattn.kernels.sm100.select import launches_of_choice
from warpattn.masks import Causal
from warpattn.problem import Call, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.launch import Launch
from warpattn.problem.operands import Operands, fitted
from warpattn.runtime.simulate import _kernel as compiled
from warpattn.sequences import Dense
from warpattn.sim import KnockOut, Report, knock_out, simulate

pytestmark = pytest.mark.full

SPREAD = 8.0  # of the scores: the softmax moves its reference often, so that O has to be rescaled


def dense(rows: int, keys: int, heads: int, heads_kv: int, dim: int) -> Call:
    q = torch.randn(1, rows, heads, dim).half()
    k = torch.randn(1, keys, heads_kv, dim).half()
    return called(q, k, k, Dense())


def called(q, k, v, sequence) -> Call:
    return Call(SPREAD * q, k, v, sequence, Causal(), return_lse=True, backend="simulate:sm100")


def pages(lengths: list[int], rows: int, heads: int, heads_kv: int, dim: int, page: int) -> Call:
    q, sequence = paged(lengths, rows, heads, heads_kv, dim, page)
    return called(q, q, q, sequence)


# Name -> (the call, parts of its keys; 0 for two query tiles a CTA)
CASES: dict[str, tuple[Callable[[], Call], int]] = {
    "2q-fused-64": (lambda: dense(64, 1100, 4, 1, 64), 0),
    "2q-fused-128": (lambda: dense(32, 900, 8, 1, 128), 0),
    "2q-ragged-64": (lambda: called(*ragged([256, 0], [1100, 9], 1, 1, 64)), 0),
    "2q-ragged-128": (lambda: called(*ragged([7, 256], [9, 900], 1, 1, 128)), 0),
    "2q-paged-64": (lambda: pages([1100], 256, 1, 1, 64, 32), 0),
    "2q-paged-128": (lambda: pages([900], 256, 1, 1, 128, 64), 0),
    "2q-copied-64": (lambda: pages([1100], 256, 1, 1, 64, 1), 0),
    "2q-copied-128": (lambda: pages([900], 256, 1, 1, 128, 4), 0),
    "1q-paged-128": (lambda: pages([808], 60, 1, 1, 128, 64), 1),
    "1q-copied-128": (lambda: pages([1300], 60, 1, 1, 128, 2), 1),
    "split-copied-64": (lambda: pages([2900, 100], 60, 1, 1, 64, 1), 2),
}


def step_of(call: Call, parts: int) -> Launch:
    """The prefill launch of a call."""
    ready = validate(call)
    q, k, v = call.sequence.operands(call.q, call.k, call.v).values()
    out, lse = poisoned(tuple(q.shape), q.dtype), poisoned(ready.lse_shape, torch.float32)
    choice = choose_2q(ready.problem)
    if parts > 0:
        one = choose_1q(ready.problem, choice.config, ARCHS["sm100"])
        assert one is not None
        choice = choice_of(ready.problem, replace(one.config, splitk_partitions=parts))
    return launches_of_choice(ready, fitted(Operands(q, k, v, out, lse, None)), call.sequence, choice)[0]


@pytest.mark.parametrize("name", CASES)
def test_every_synchronisation_is_needed(name: str) -> None:
    make, parts = CASES[name]
    step = step_of(make(), parts)

    def once(module, schedule) -> Report:
        return simulate(module, step.grid, step.args, schedule, step_limit=40_000, first_finding=True)

    reason: Callable[[KnockOut], str | None] = reason_1q if parts > 0 else reason_2q
    results = knocked_out(compiled(step), once, reason)
    assert len(results) > 50
    barriers = [found for found in results if not found.op.startswith("tcgen05.fence")]
    assert sum(found.noticed for found in barriers) > 0.8 * len(barriers)


def test_the_combination_of_parts_only_waits_for_the_preceding_launch() -> None:
    call = pages([2900, 100], 60, 1, 1, 64, 64)
    ready = validate(call)
    q, k, v = call.sequence.operands(call.q, call.k, call.v).values()
    x = fitted(Operands(q, k, v, torch.empty_like(q), torch.empty(ready.lse_shape), None))
    one = choose_1q(ready.problem, choose_2q(ready.problem).config, ARCHS["sm100"])
    assert one is not None
    split = choice_of(ready.problem, replace(one.config, splitk_partitions=2))
    first, combine = launches_of_choice(ready, x, call.sequence, split)
    assert combine.name == "sm100.combine"
    assert knock_out(compiled(first), lambda module: Report())
    assert [found.op for found in knock_out(compiled(combine), lambda module: Report())] == ["tt.grid_dependency_wait"]
