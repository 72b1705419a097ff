"""The pytest plugin of `python -m tests.peers`: installs the drop-ins, draws cases, counts what is refused.

Its settings come in the environment, since workers of pytest-xdist have no other way to them.
"""

from __future__ import annotations

import os
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

from tests.peers import stand_ins
from warpattn import AttentionError
from warpattn.problem import rules
from warpattn.runtime.merging import states

# What an error says, and the reason in a few words.
REFUSED: dict[str, str] = {
    r"dropout_p is": "there is no dropout",
    r"private function": "a private function of flash-attn",
    r"takes head dims up to": "head dims that no kernel has",
    r"the page size is \d+; with 8": "pages of 8 bits whose size is no multiple of 8 keys",
    r"new keys and values have 16 bits": "new keys of 8 bits that are rotated",
}
# Tests that look at something else than results.
LISTED: dict[str, str] = {
    "test_flash_attn_invalid_head_dim": "head dims that flash-attn refuses are served here",
    "test_flash_attn_kvcache_paged_block_table_bounds": "refused, with an AttentionError and not a RuntimeError",
    "test_flash_attn_varlen_tensor_max_seqlen_reuses_fwd_cache": "looks into flash-attn's kernels in memory",
    "test_flash3_bw_compatibility": "schemas of flash-attn's operators",
}
# With one key the gradient of its score is 0 and PyTorch's error exactly 0: the suite's bound, twice that error, leaves
# no room for the last bit of a sum in another order.
ONE_KEY = re.compile(r"assert ([\d.e-]+) <= \(\(\d \* 0\.0\)")
LAST_BIT = 4e-3


def pytest_configure() -> None:
    """Install everything before the suite is imported."""
    stand_ins.install(int(os.environ["PEERS_VERSION"]), Path(os.environ["PEERS_FOLDER"]))
    backend = os.environ["PEERS_BACKEND"]
    if backend != "cuda":
        stand_ins.pretend_a_card()
    if backend.startswith("simulate:"):
        choose = rules.choose_backend
        for module in (rules, states):  # a drop-in's function cannot name a backend
            module.choose_backend = lambda noted, name, *rest: choose(noted, backend, *rest)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that are listed do not run."""
    for item in items:
        name = item.name.partition("[")[0]
        if name in LISTED:
            item.add_marker(pytest.mark.skip(reason=f"listed: {LISTED[name]}"))


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Draw cases instead of making all of them."""
    marks = [mark for mark in metafunc.definition.own_markers if mark.name == "parametrize"]
    if not marks:
        return
    metafunc.definition.own_markers = [m for m in metafunc.definition.own_markers if m.name != "parametrize"]
    axes = [([name.strip() for name in _names(mark.args[0])], list(mark.args[1])) for mark in marks]
    names = [name for axis, _ in axes for name in axis]
    cases, most = int(os.environ["PEERS_CASES"]), int(os.environ["PEERS_LARGEST"])
    chance = random.Random(f"{os.environ['PEERS_SEED']} {metafunc.function.__name__}")
    rows: dict[str, tuple[Any, ...]] = {}
    for _ in range(50 * cases):
        row = tuple(x for axis, values in axes for x in _values(chance.choice(values), len(axis)))
        if len(rows) < cases and fits(dict(zip(names, row, strict=True)), most):
            rows[repr(row)] = row
    ids = [", ".join(f"{n}={x}" for n, x in zip(names, row, strict=True)) for row in rows.values()]
    metafunc.parametrize(names, list(rows.values()), ids=ids)


def fits(case: dict[str, Any], most: int) -> bool:
    """Whether no sequence of a case is longer than `most`."""
    return all(value <= most for name, value in case.items() if "seq" in name and isinstance(value, int))


def _names(given: Any) -> list[str]:
    return given.split(",") if isinstance(given, str) else list(given)


def _values(given: Any, count: int) -> tuple[Any, ...]:
    if isinstance(given, ParameterSet):
        return tuple(given.values)
    return tuple(given) if count > 1 else (given,)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A refusal with a known reason is no failure."""
    report = (yield).get_result()  # type: ignore[func-returns-value]
    reason = None if call.excinfo is None else known(call.excinfo.value)
    if reason is not None:
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, reason)


def known(error: BaseException) -> str | None:
    """The reason for an error that has one."""
    text = str(error)
    if isinstance(error, AttentionError):
        return next((f"refused: {said}" for found, said in REFUSED.items() if re.search(found, text)), None)
    found = ONE_KEY.search(text) if isinstance(error, AssertionError) else None
    return "listed: the last bit, with one key" if found and float(found[1]) < LAST_BIT else None


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Counts by reason."""
    counts = Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", []))
    for reason, count in counts.most_common():
        terminalreporter.write_line(f"{count:6} {reason}")
