"""Pytest: `@pytest.mark.warpsim(arch="sm90", seeds=20)` runs a test's kernels in the simulator; findings fail it.

Keywords are those of `launches`. The plugin only imports Triton when a marked test runs.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest


def pytest_configure(config: Any) -> None:
    """Register the marker."""
    text = "warpsim(arch, schedules='all', seeds=1): run the test's Triton and Gluon kernels in warpattn's simulator"
    config.addinivalue_line("markers", text)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Generator[None, Any, Any]:
    """Run a marked test inside `launches`."""
    marker = item.get_closest_marker("warpsim")
    if marker is None:
        return (yield)
    from .launches import launches

    with launches(*marker.args, **marker.kwargs) as runs:
        try:
            result = yield
        finally:
            if not runs.clean:
                item.add_report_section("call", "warpsim", str(runs))
    if not runs.launched:
        pytest.fail(f"{item.name} is marked warpsim and launched no kernel", pytrace=False)
    if not runs.clean:
        pytest.fail(str(runs), pytrace=False)
    return result
