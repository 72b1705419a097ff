"""How many modules a call of attention passes, and how often it goes from one to another, on the stand-in card.

A reader follows a call through these modules, so the numbers are ceilings. Counted are calls of functions written in
`warpattn`, in the order in which they are made; a change is a call of a function of another module than the last one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from itertools import groupby, pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

import warpattn as wa
from tests.launches import small_call
from tests.unit.runtime.card import make_card, normal  # noqa: F401 (a fixture)
from warpattn.language.traced import Traced
from warpattn.problem.arch import triton_target
from warpattn.runtime import bound_launches, execute, kernel_cache
from warpattn.runtime.launches import list_launches
from warpattn.sim.compile import to_ttgir

PACKAGE = f"{Path(wa.__file__).parent}/"


class Counted(NamedTuple):
    """What a call passes."""

    modules: int
    changes: int

    def within(self, most: Counted) -> bool:
        return self.modules <= most.modules and self.changes <= most.changes


# The first call of a problem, with nothing planned or loaded for it, and the second. The planner weighs its candidates
# as numbers, and asks for the configuration of one that is better. A mask that no call has had yet is traced first:
# nine modules of masks and their language, which a second mask of the same value does not enter. The ranges of its
# integers are decided meanwhile, and the planner counts the key tiles of its candidates.
FIRST = {"no mask": Counted(14, 53), "causal": Counted(25, 145)}
SECOND = Counted(4, 4)
KERNEL_FILES = {"no mask": 12, "causal": 16}  # with code in the compiled kernel: of hidden values in the second
PATH_FILES, PATH_LINES = 26, 4_401  # whole files of a first call without a mask and its kernel; aims: 22, 2,800
MASKS: dict[str, Callable[[], wa.Mask | None]] = {"no mask": lambda: None, "causal": wa.Causal}


def passed(call: Callable[[], object]) -> list[str]:
    """The module of every function of `warpattn` that is called, in order."""
    modules = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            modules.append(frame.f_code.co_filename.removeprefix(PACKAGE))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return modules


def counted(modules: list[str]) -> Counted:
    return Counted(len(set(modules)), sum(one != other for one, other in pairwise(modules)))


def path(modules: list[str]) -> str:
    """The modules in order, each once for a run of its functions."""
    return " > ".join(name for name, _ in groupby(modules))


def forget_plans() -> None:
    """Clear every cache of what a function of the package has returned, as in a new process."""
    for module in [module for name, module in sys.modules.items() if name.startswith("warpattn.")]:
        for value in vars(module).values():
            if callable(getattr(value, "cache_clear", None)):
                value.cache_clear()


@pytest.fixture(name="calls")
def first_and_second(request: pytest.FixtureRequest, card: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Modules of the first and the second call with a mask, with everything imported and nothing known about them."""
    mask = MASKS[request.param]()
    artifacts: dict[Any, Any] = {}
    compiled = kernel_cache.find

    def find(key: Any, build: Any) -> Any:
        if key not in artifacts:
            artifacts[key] = compiled(key, build)
        return artifacts[key]

    # A kernel is described to Triton by the call before the two: what is counted is the way to the card.
    monkeypatch.setattr(kernel_cache, "find", find)
    q, k, v = (normal() for _ in range(3))
    wa.attention(q, k, v, mask=mask)
    for known in (Traced.shared, bound_launches._loaded, execute._known):
        known.clear()
    forget_plans()
    mask = MASKS[request.param]()
    return [passed(lambda: wa.attention(q, k, v, mask=mask)) for _ in range(2)]


@pytest.mark.parametrize(("calls", "name"), [(name, name) for name in MASKS], indirect=["calls"], ids=str)
def test_modules_of_a_call(calls: list[list[str]], name: str) -> None:
    first, second = map(counted, calls)
    assert first.within(FIRST[name]), f"{first}: {path(calls[0])}"
    assert second.within(SECOND), f"{second}: {path(calls[1])}"


def files_of_the_kernel(name: str) -> set[str]:
    """Files whose code is in the kernel of a dense call."""
    checked, x, sequence = small_call("sm90", (128, 128), modifiers=(MASKS[name](), None))
    (launch,) = list_launches(checked, x, sequence)
    code = to_ttgir(launch.source(), triton_target("sm90"), dict(launch.options)).asm["ttgir"]
    return set(re.findall(rf'loc\("{PACKAGE}([^"]+)"', code))


@pytest.mark.parametrize("name", MASKS)
def test_files_of_the_kernel(name: str) -> None:
    found = files_of_the_kernel(name)
    assert "kernels/sm90/prefill/attend.py" in found and len(found) <= KERNEL_FILES[name], sorted(found)


@pytest.mark.parametrize("calls", ["no mask"], indirect=True)
def test_what_a_reader_of_a_dense_call_reads(calls: list[list[str]]) -> None:
    files = {*calls[0], *files_of_the_kernel("no mask")}
    lines = {file: len(Path(PACKAGE, file).read_text().splitlines()) for file in files}
    assert len(lines) <= PATH_FILES and sum(lines.values()) <= PATH_LINES, lines


def test_a_detour_is_counted() -> None:
    assert counted(["api", "api", "plan", "api", "plan"]) == Counted(2, 3)
    call = passed(lambda: wa.attention(normal(), normal(), normal(), backend="reference"))
    assert call[0] == "api/dense.py" and "reference.py" in call and len(call) > counted(call).changes
    assert not Counted(3, 9).within(Counted(3, 8)) and not Counted(4, 8).within(Counted(3, 8))
