"""What every test on a card starts from: its kernels compiled, in parallel, before the first one runs."""

import fcntl
import os
from pathlib import Path

import pytest

from tests.cases import Case
from tests.gpu import precompile

HERE = Path(__file__).parent


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The kernels of all selected tests that are parametrised by a case. The first of pytest-xdist's workers that needs
    one compiles them on all cores, and the others wait for it."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and HERE in item.path.parents]
    values = [value for item in items if hasattr(item, "callspec") for value in item.callspec.params.values()]
    cases = [value for value in values if isinstance(value, Case) and value.seq_q and value.seq_k]
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    done = shared / "kernels-compiled"
    with (shared / "kernels-compiling").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            precompile.fill(cases)
            done.touch()
