"""Each synchronising operation of the Hopper backward is needed, or stands here with the reason why it can go.

Of its main kernel, in its forms: 64 keys a warpgroup, head dims above 128, a fixed order of additions, sequences end to
end, and a score whose slope is multiplied in; and of the kernel after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.sim.backward import Case, gradients, launches, operands
from tests.sim.knocking import knocked_out, reviewed
from warpattn.masks import Causal, Padding, SlidingWindow
from warpattn.problem.backward import fitted_gradients
from warpattn.problem.launch import Launch
from warpattn.runtime.simulate import Options, run_launch
from warpattn.runtime.simulate import _kernel as compiled
from warpattn.scores import SoftCap
from warpattn.sim import DependentGrid, KnockOut, Report, knock_out, loosen_waits, simulate
from warpattn.sim.saved import SavedMemory

pytestmark = pytest.mark.full

ONCE = "keys and values are loaded once: the first lap over a ring never waits"
LATEST = "nothing is loaded behind the last tile"
QUERIES = "Q of this slot, acquired before, was released after dO of the same tile, by the same warps"
PASSED = "the turn was passed before, which waits for all additions"
BY_PRODUCT = (
    "P of the tile, waited for next, was made from these queries; dO, waited for before, was loaded after the visit"
)
KEYS = "the first dS was made from these keys"
LAST_KEYS = "no further keys are loaded"
REPLACES = "setp.lt.u32"  # how the assembly ends that makes keys and values finite
# Operation, what stands in one of its lines of Python, why it can go.
REPLACED = (REPLACES, "gl.inline_asm(replace_asm(", "it orders nothing; the fence behind it does")
REDUNDANT = [
    REPLACED,
    ("ttng.fence_async_shared", "# TMA sees the new barriers", "not modelled"),
    ("ttng.wait_barrier", "rings.k.consumer_wait(held)", KEYS),
]
ARRIVE = "mbarrier.arrive.release.cta.shared::cta.b64"
SINGLE = [  # a CTA has one key tile
    ("ttng.wait_barrier", "ctx.rings.k.producer_acquire(key_state)", ONCE),
    (ARRIVE, "rings.k.consumer_release(held)", LAST_KEYS),
    (ARRIVE, "rings.q.consumer_release(state)  # the last of", LAST_KEYS),
]
SHARES = [
    ("mbarrier.arrive.release.cta.shared::cta.b64", "rings.do.consumer_release(state)", LATEST),
    ("ttng.wait_barrier", "load_rows(ctx, (ctx.tensors.do, ", QUERIES),
]
COVERED = ("ttng.warp_group_dot_wait", "dp, dv, p = wait_value_scores(", "the wait of dK behind it covers dV, too")
FIXED = [
    ("ttng.async_tma_store_wait", "tma.store_wait(config.dq_buffers - 1)", PASSED),
    ("ttng.async_tma_store_wait", "tma.store_wait(0)  # shared memory must outlive", PASSED),
]
ADDING = [  # attending warpgroups that add dQ
    ("ttng.warp_group_dot_wait", "dv = wait_columns(0, dv, weights.p)", "the wait of dP behind it covers dV, too"),
    (
        "ttng.wait_barrier", "rings.ds.producer_acquire(PipelineState(",
        "dS of the tile before, waited for, was made when the other warpgroup had read this slot",
    ),
    (
        "ttng.wait_barrier", "full = ctx.rings.q.producer_acquire(state)",
        "the warpgroups that released the slot before had waited for this one's tile; visits have slots of their own",
    ),
    ("ttng.fence_async_shared", "replace(tile.reshape(", "the fence behind a warpgroup's last box covers the others"),
    ("ttng.async_tma_store_wait", "tma.store_wait(1)", "both halves are free when the first two parts are stored"),
]  # fmt: skip
WINDOW = Causal() & SlidingWindow(200)  # no row sees the first keys
SHORT = Causal() & Padding(torch.tensor([380]))  # the last keys are; three CTAs add to the last queries
PLAIN = Case(400, 740, mask=WINDOW)
CASES = {
    "64": (PLAIN, SHARES),
    "128": (replace(PLAIN, dim=128), SHARES),
    "by product": (
        replace(PLAIN, dim=256),
        [*SINGLE, ("ttng.wait_barrier", "rings.q.consumer_wait(following)", BY_PRODUCT)],
    ),
    "attending warpgroups add": (replace(PLAIN, dim=192, dim_v=128), [*SHARES, *ADDING]),
    "fixed order": (
        Case(400, 500, mask=SHORT, deterministic=True, heads=2, heads_kv=2), [*SINGLE, *SHARES, *FIXED]
    ),
    "fixed order side by side": (
        Case(400, 500, mask=SHORT, deterministic=True, heads=2), [*SINGLE, *SHARES, *FIXED]
    ),
    "fixed order of two sums": (
        Case(400, 500, mask=SHORT, deterministic=True, heads=3), [*SINGLE, *SHARES, *FIXED]
    ),
    "ragged": (Case(400, 740, mask=WINDOW, lengths=((100, 440), (300, 300))), SHARES),
    "score": (replace(PLAIN, score=SoftCap(20.0)), SHARES),
}


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors among arguments."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_of(tuple(value.values()))
    elif isinstance(value, tuple):
        for part in value:
            yield from tensors_of(part)


def made_by(launch: Launch) -> list[torch.Tensor]:
    """What a launch writes."""
    names = {"backward_key_tiles": "tiles", "backward_prepare": "made", "backward": "writes"}
    return list(tensors_of(launch.args[names[launch.name.partition(".")[2]]]))


def changed(
    case: Case, name: str, redundant: list[tuple[str, ...]], change: Callable[..., list[KnockOut]] = knock_out
) -> list[KnockOut]:
    """Every operation of the launch of that name changed; the launch before it has not ended when it begins."""
    inputs = case.inputs()
    x = fitted_gradients(operands(case, inputs, gradients(case, inputs, torch.float64)))
    before: list[torch.Tensor] = []
    for launch in launches(case, x, inputs):
        if launch.name == name:
            break
        assert run_launch(launch, Options()).clean
        before = made_by(launch)
    return taken_out(launch, redundant, change, before=before, fixed_order=case.deterministic)


def taken_out(
    launch: Launch, redundant: list[tuple[str, ...]], change: Callable[..., list[KnockOut]] = knock_out, *,
    before: Sequence[torch.Tensor] = (), fixed_order: bool = False,
) -> list[KnockOut]:  # fmt: skip
    """Every operation of a launch changed; what the launch `before` it makes is not there when it begins."""
    reached = {part.untyped_storage().data_ptr() for part in tensors_of(launch.args)}
    programs = (2,) if launch.persistent else launch.grid  # a CTA takes several key tiles
    grid = DependentGrid(programs, [part for part in before if part.untyped_storage().data_ptr() in reached])
    memory = SavedMemory(launch.args.values())

    def once(module: Any, schedule: str) -> Report:
        memory.restore()
        options = {"step_limit": 100_000, "first_finding": True, "fixed_order": fixed_order}
        return simulate(module, grid, launch.args, schedule, **options)

    return knocked_out(compiled(launch), once, reviewed(redundant), change=change)


@pytest.mark.parametrize("name", CASES)
def test_the_backward_needs_its_synchronisation(name: str) -> None:
    case, more = CASES[name]
    results = changed(case, "sm90.backward", [*REDUNDANT, *more])
    results = [found for found in results if found.op != REPLACES]
    # Where a CTA has one key tile no role hands on its keys or last queries.
    most = 8 + (6 if SINGLE[0] in more else 0) + (13 if ADDING[0] in more else 0)
    assert len(results) > 60 and sum(found.noticed for found in results) >= len(results) - most


@pytest.mark.parametrize("dim", [64, 256])
def test_looser_waits_are_missed_in_a_fixed_order(dim: int) -> None:
    """test_loosened_waits.py does it to the other forms, whose additions may be in any order."""
    results = changed(replace(CASES["fixed order"][0], dim=dim), "sm90.backward", [COVERED, *FIXED], loosen_waits)
    assert len(results) > 20


def test_the_kernel_behind_it_waits_for_its_end() -> None:
    (found,) = changed(PLAIN, "sm90.backward_finish", [])
    assert found.op == "tt.grid_dependency_wait" and found.findings[0].kind == "Race"
