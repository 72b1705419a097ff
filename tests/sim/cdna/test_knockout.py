"""Which waits and commits the CDNA kernels need: each is taken out, and each wait loosened by one and by two.

What a kernel says itself are the waits and commits of its copies to LDS; kernels whose keys come through registers, and
the one that adds parts, say nothing. The barriers, and the waits for registers, are the compiler's: these are taken out
of the machine code, in tests/unit/machine_code/test_gcn_knockout.py.
"""

from typing import Any

import pytest

pytest.importorskip("triton")


from tests.drawn import drawn
from tests.sim import backward
from tests.sim.backward import launches_of
from tests.sim.cdna.calls import ARCHS, Case, decode_choice, outputs, paged, prefill_choice, ragged, ready_of
from warpattn.kernels.cdna.launch import launches_of_choice
from warpattn.masks import Causal
from warpattn.problem import Call
from warpattn.problem.arch import triton_target
from warpattn.problem.launch import Choice, Launch
from warpattn.problem.operands import Operands, fitted
from warpattn.sim import Report, knock_out, loosen_waits, simulate
from warpattn.sim.compile import to_ttgir

both = pytest.mark.parametrize("arch", ARCHS)
PREFILL = Case(40, 300, mask=Causal(), sinks=True)
DECODE = Case(2, 700, heads=4, mask=Causal(), sinks=True)


class Bench:
    """One launch of a problem whose kernel is compiled once and run changed."""

    def __init__(self, call: Call, arch: str, choice: Choice | None = None, number: int = 0) -> None:
        self.call, self.choice, self.number = call, choice, number
        self.ready = ready_of(call, arch)
        self.kernel = launch_kernel(self.step())

    def step(self) -> Launch:
        """The launch, with fresh outputs."""
        call = self.call
        given = call.sequence.operands(call.q, call.k, call.v).values()
        fitting = fitted(Operands(*given, *outputs(call, self.ready), call.sinks))
        return launches_of_choice(self.ready, fitting, call.sequence, self.choice)[self.number]

    def run(self, kernel: Any) -> Report:
        """The first report with findings under two schedules, or a clean one."""
        report = Report()
        for schedule in ("lazy", "adversarial"):
            step = self.step()
            report = simulate(kernel, step.grid, step.args, schedule, step_limit=20_000, first_finding=True)
            if not report.clean:
                break
        return report


def launch_kernel(step: Launch) -> Any:
    return to_ttgir(step.source(), triton_target(step.arch), dict(step.options))


def dense(arch: str, kind: str, **changes: Any) -> Bench:
    call = PREFILL.call()
    return Bench(call, arch, prefill_choice(call, arch, kind, **changes))


def in_pages(case: Case, arch: str, size: int) -> Bench:
    return Bench(paged(case, [70, 0, 300], size), arch)


# Every shipped kernel with copies to LDS, and the kinds of buffers that are there to be compared.
COPYING = {
    "lds gfx942": lambda: dense("gfx942", "lds"),
    "lds gfx950": lambda: dense("gfx950", "lds"),
    "ring gfx942": lambda: dense("gfx942", "ring"),
    "ring gfx950": lambda: dense("gfx950", "ring"),
    "ragged": lambda: Bench(ragged(PREFILL, [5, 0, 130], [7, 3, 300]), "gfx950"),
    "pages of 16": lambda: in_pages(PREFILL, "gfx950", 16),
    "pages of 64": lambda: in_pages(PREFILL, "gfx950", 64),
    "padded pages": lambda: in_pages(Case(40, 1, dim=72, mask=Causal()), "gfx950", 16),
    "decode": lambda: Bench(DECODE.call(), "gfx950", decode_choice(DECODE.call(), "gfx950", 1)),
    "decode in parts": lambda: Bench(DECODE.call(), "gfx950", decode_choice(DECODE.call(), "gfx950", 2)),
    "decode, pages of 16": lambda: in_pages(DECODE, "gfx950", 16),
    "decode, pages of 128": lambda: in_pages(DECODE, "gfx950", 128),
    "three slots gfx942": lambda: dense("gfx942", "ring", slots=3),
    "three slots gfx950": lambda: dense("gfx950", "ring", slots=3),
}
# Each kind of buffer, sequence and step.
DRAWN = ("lds gfx942", "ring gfx950", "padded pages", "decode in parts")
SILENT = {
    "registers": lambda arch: dense(arch, "registers"),
    "combine": lambda arch: Bench(DECODE.call(), arch, decode_choice(DECODE.call(), arch, 2), number=1),
}


@pytest.mark.parametrize("name", drawn(COPYING, DRAWN))
def test_every_wait_and_commit_is_needed(name):
    """Four each with one slot (K and V have two strips each); with more, a wait before K, before V and at the end."""
    bench = COPYING[name]()
    assert bench.run(bench.kernel).clean
    results = knock_out(bench.kernel, bench.run)
    waits = [found.noticed for found in results if found.op == "ttg.async_wait"]
    commits = [found.noticed for found in results if found.op == "ttg.async_commit_group"]
    slots = 3 if name.startswith("three") else 2
    assert len(waits) == (4 if name.startswith("lds") else 3)
    assert len(commits) == (4 if name.startswith("lds") else 2 * slots)
    assert not [str(found) for found in results if not found.noticed]


@pytest.mark.parametrize("name", drawn(COPYING, DRAWN))
def test_a_looser_wait_is_found(name):
    """A ring waits for all but the later groups before it reads K and V: 1 and 2 with two slots, 3 and 4 with three.
    Each wait is loosened by one, by two and by any number."""
    bench = COPYING[name]()
    results = loosen_waits(bench.kernel, bench.run)
    assert len(results) == 3 * (4 if name.startswith("lds") else 3)
    assert not [str(found) for found in results if not found.noticed]


@both
def test_a_backward_has_nothing_to_take_out(arch):
    for step in launches_of(backward.Case(40, 300, mask=Causal(), sinks=True, arch=arch)):
        assert not knock_out(launch_kernel(step), lambda module: Report())


@both
@pytest.mark.parametrize("name", SILENT)
def test_other_kernels_have_nothing_to_take_out(arch, name):
    assert not knock_out(SILENT[name](arch).kernel, lambda module: Report())


@pytest.mark.parametrize("make", [lambda: Bench(DECODE.call(), "gfx942"), lambda: in_pages(PREFILL, "gfx942", 16)])
def test_shipped_kernels_of_gfx942_copy_nothing(make):
    assert not knock_out(make().kernel, lambda module: Report())
