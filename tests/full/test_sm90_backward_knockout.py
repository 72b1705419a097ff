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

ARRIVE = "mbarrier.arrive.release.cta.shared::cta.b64"
ONCE = "keys and values are loaded once: the first lap over a ring never waits"
FIRST = "the loader's first queries: the first lap over a ring never waits"
QUERIES = "Q of this slot, acquired before, was released after dO of the same tile, by the same warps"
BY_PRODUCT = (
    "P of the tile, waited for next, was made from these queries; dO, waited for before, was loaded after the visit"
)
KEYS = "the first dS was made from these keys"
LAST_KEYS = "no further keys are loaded"
REPLACES = "setp.lt.u32"  # how the assembly ends that makes keys and values finite
# Operation, what stands in one of its lines of Python, why it can go.
REPLACED = (REPLACES, "gl.inline_asm(replace_asm(", "it orders nothing; the fence behind it does")
REDUNDANT = [REPLACED, ("ttng.fence_async_shared", "# TMA sees the new barriers", "not modelled")]
REDUCED = ("ttng.wait_barrier", "rings.k.consumer_wait(held)", KEYS)  # in `reduce`
OUTPUT = ("ttng.wait_barrier", "load_rows(ctx, (ctx.tensors.do, ", QUERIES)
SEVERAL = [REDUCED, OUTPUT]  # a CTA has several key tiles
MANY = (
    "ttng.wait_barrier", "ctx.rings.k.producer_acquire(k_state)",
    "three or more query tiles see the keys between, and `reduce` is at most two behind",
)  # fmt: skip
SINGLE = [  # a CTA has one key tile
    REDUCED,
    ("ttng.wait_barrier", "load_queries(ctx, slot_of(visits, STAGES), visit)", FIRST),
    ("ttng.wait_barrier", "ctx.rings.k.producer_acquire(k_state)", ONCE),
    (ARRIVE, "rings.k.consumer_release(held)", LAST_KEYS),
]
COVERED = ("ttng.warp_group_dot_wait", "dp, dv, p = wait_value_scores(", "the wait of dK behind it covers dV, too")
ADDING = [  # attending warpgroups that add dQ
    OUTPUT,
    ("ttng.warp_group_dot_wait", "dv = wait_columns(0, dv, weights.p)", "the wait of dP behind it covers dV, too"),
    (
        "ttng.wait_barrier", "acquire(rings.ds, state)",
        "dS of the tile before, waited for, was made when the other warpgroup had read this slot",
    ),
    ("ttng.fence_async_shared", "replace(tile.reshape(", "the fence behind a warpgroup's last box covers the others"),
    ("ttng.async_tma_store_wait", "tma.store_wait(1)", "both halves are free when the first two parts are stored"),
]  # fmt: skip
EITHER = (
    "ttng.wait_barrier", "acquire(ctx.rings.ordered.added, earlier)",
    "the other warpgroup waits for the slot, too, and it is full only when both have arrived",
)  # fmt: skip
WINDOW = Causal() & SlidingWindow(200)  # no row sees the first keys
SHORT = Causal() & Padding(torch.tensor([380]))  # the last keys are; three CTAs add to the last queries
PLAIN = Case(400, 740, mask=WINDOW, long=True)
IN_TURNS = Case(400, 500, heads=2, heads_kv=2, mask=SHORT, deterministic=True)
LONG = Case(400, 380, batch=3, mask=Causal(), deterministic=True)  # three or more query tiles see all keys
# A case, why operations can go, and how many these are: not more than were reviewed.
CASES = {
    "64": (PLAIN, SEVERAL, 4),
    "64 with few queries": (replace(PLAIN, long=False), [*SEVERAL, MANY], 5),
    # K waits for its slot if fewer than three query tiles see the keys between: here one, which sees none.
    "128": (replace(PLAIN, seq_k=1000, dim=128), SEVERAL, 4),
    "by product": (
        replace(PLAIN, dim=256),
        [*SINGLE, ("ttng.wait_barrier", "rings.q.consumer_wait(following)", BY_PRODUCT)],
        6,
    ),
    # The end waits for its slot if two query tiles see the last keys.
    "attending warpgroups add": (replace(PLAIN, seq_k=960, dim=192, dim_v=128), ADDING, 21),
    "attending warpgroups store first": (Case(600, 380, mask=Causal(), dim=192, dim_v=128), [*ADDING, EITHER], 27),
    "fixed order": (replace(IN_TURNS, batch=3, mask=Causal() & Padding(torch.tensor([380] * 3))), SEVERAL, 4),
    "fixed order side by side": (replace(LONG, heads=2), [*SEVERAL, MANY], 5),
    "fixed order of two sums": (replace(LONG, heads=7), [*SEVERAL, MANY], 5),
    "fixed order of two parts": (replace(LONG, heads=2, mask=None), [*SEVERAL, MANY], 5),
    "ragged": (Case(400, 740, mask=WINDOW, lengths=((100, 440), (300, 300))), SEVERAL, 4),
    "score": (replace(PLAIN, score=SoftCap(20.0)), SEVERAL, 4),
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
    few = 3 if launch.key[0].deterministic else 2  # a CTA takes several key tiles; CTAs in turns wait for several
    programs = (max(few, launch.persistent),) if launch.persistent else launch.grid
    grid = DependentGrid(programs, [part for part in before if part.untyped_storage().data_ptr() in reached])
    memory = SavedMemory(launch.args.values())

    def once(module: Any, schedule: str) -> Report:
        memory.restore()
        options = {"step_limit": 100_000, "first_finding": True, "fixed_order": fixed_order}
        return simulate(module, grid, launch.args, schedule, **options)

    return knocked_out(compiled(launch), once, reviewed(redundant), change=change)


def without_use(reasons: Sequence[tuple[str, ...]], results: Sequence[KnockOut]) -> list[tuple[str, ...]]:
    """The reasons for which no operation can go."""
    missed = [found for found in results if not found.noticed]
    return [row for row in reasons if not any(map(reviewed([row]), missed))]


@pytest.mark.parametrize("name", CASES)
def test_the_backward_needs_its_synchronisation(name: str) -> None:
    case, more, spare = CASES[name]
    results = changed(case, "sm90.backward", [*REDUNDANT, *more])
    assert not without_use(more, results)
    results = [found for found in results if found.op != REPLACES]
    assert len(results) > 60 and sum(not found.noticed for found in results) == spare


@pytest.mark.parametrize(("dim", "reasons"), [(64, [COVERED]), (256, [])], ids=["64", "256"])
def test_looser_waits_are_missed_in_a_fixed_order(dim: int, reasons: list[tuple[str, ...]]) -> None:
    """test_loosened_waits.py does it to the other forms, whose additions may be in any order."""
    results = changed(replace(IN_TURNS, dim=dim), "sm90.backward", reasons, loosen_waits)
    assert len(results) > 20 and not without_use(reasons, results)


def test_the_kernel_behind_it_waits_for_its_end() -> None:
    (found,) = changed(PLAIN, "sm90.backward_finish", [])
    assert found.op == "tt.grid_dependency_wait" and found.findings[0].kind == "Race"
