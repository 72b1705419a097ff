"""One call that sweeps schedules and seeds: the orders, the memory that every run finds, what its findings name."""

import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("triton")

from tests.sim.builds import run
from tests.sim.machine.kernels.launched import colliding_kernel, ticket_kernel
from warpattn.sim import Report, SimulationError
from warpattn.sim.sweep import orders_of


def tickets(**options) -> tuple[Report, np.ndarray]:
    count, out = np.zeros(1, np.int32), np.zeros(4, np.int32)
    return run(ticket_kernel, (4,), {"count": count, "out": out}, **options), out


def test_orders() -> None:
    assert orders_of("all", 2) == (("eager", 0), ("lazy", 0), ("random", 0), ("random", 1), ("adversarial", 0))
    assert orders_of(["random", "lazy"], 2) == (("random", 0), ("random", 1), ("lazy", 0))
    assert orders_of("random", [7, 3]) == (("random", 7), ("random", 3))


def test_a_finding_names_the_run_that_repeats_it() -> None:
    report, out = tickets(schedules="all", seeds=5)
    assert len(report.runs) == 8 and report.steps == sum(each.steps for each in report.runs)
    (found,) = report.findings
    assert found.kind == "OutOfBounds" and found.seen is not None and found.seen.of == 8
    wrong = [(each.schedule, each.seed) for each in report.runs if not each.clean]
    assert 0 < len(wrong) == found.seen.runs < 8, "some orders show it, some do not"
    assert (found.seen.schedule, found.seen.seed) == wrong[0]
    assert f"schedule {found.seen.schedule!r}, seed {found.seen.seed}; in {len(wrong)} of 8 runs" in str(report)
    again, _ = tickets(schedule=found.seen.schedule, seed=found.seen.seed)
    assert again.findings == [found] and tickets()[0].clean
    assert np.array_equal(out, np.arange(4)), "the results are those of the first run, which is right"


def test_seeds_alone_sweep_every_schedule_and_a_list_chooses_them() -> None:
    assert len(tickets(seeds=2)[0].runs) == 5
    assert [each.seed for each in tickets(schedules="random", seeds=[4, 9])[0].runs] == [4, 9]
    assert not tickets()[0].runs


def test_the_same_fault_of_all_runs_is_one_finding() -> None:
    x, out = np.ones(32, np.float32), np.zeros(16, np.float32)
    report = run(colliding_kernel, (2,), {"x": x, "out": out}, {"BLOCK": 16}, schedules="all", seeds=2)
    assert [found.seen.runs for found in report.findings if found.seen] == [5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedules": "slow"}, "schedules has 'slow'; it must be 'all' or of eager, lazy, random, adversarial"),
        ({"schedules": []}, "schedules is \\[\\]"),
        ({"schedules": 3}, "schedules is 3"),
        ({"seeds": 0}, "seeds is 0; it must be an integer from 1 on, or a list of seeds"),
        ({"seeds": "x"}, "seeds is 'x'"),
        ({"seeds": [1.5]}, "seeds is \\[1.5\\]"),
        ({"seeds": 2, "schedule": "lazy"}, "schedule is 'lazy' and seed 0; a sweep takes schedules and seeds instead"),
        ({"seed": "x"}, "seed is 'x'; it must be an integer"),
        ({"warps": 3}, "simulate has no option 'warps'; it has in_flight, step_limit, timing"),
    ],
)
def test_what_is_refused(options: dict, message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        tickets(**options)


ALONE = """
import sys
import warpattn.sim, warpattn.sim.host.launches, warpattn.sim.host.pytest_plugin
ours = {name for name in sys.modules if name.startswith("warpattn.") and not name.startswith("warpattn.sim")}
print(*sorted(ours), *(name for name in ("typer", "rich", "transformers", "safetensors") if name in sys.modules))
"""


def test_the_simulator_imports_nothing_else_of_the_package() -> None:
    found = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["warpattn.runtime", "warpattn.runtime.triton_exit"]  # for its exit
