"""What every test on a card starts from: its kernels compiled, in parallel, before the first one runs."""

from pathlib import Path

import pytest

from tests.cases import Case
from tests.gpu import precompile

HERE = Path(__file__).parent


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels(request: pytest.FixtureRequest) -> None:
    """The kernels of all selected tests that are parametrised by a case."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and HERE in item.path.parents]
    values = [value for item in items if hasattr(item, "callspec") for value in item.callspec.params.values()]
    precompile.fill(value for value in values if isinstance(value, Case) and value.seq_q and value.seq_k)
