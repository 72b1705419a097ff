"""What every test starts from: a fixed seed, one thread per worker, deterministic property tests."""

import gc
import os
import sys
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from tests.kernels import keep_kernels
from warpattn.runtime.kernel_cache import triton_version

# Deadlines and the check for slow drawing measure the machine's load, not the code. Derandomised, red runs stay red;
# --hypothesis-profile=explore looks for new counter-examples instead.
UNTIMED = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow], "print_blob": True}
hypothesis.settings.register_profile("default", derandomize=True, max_examples=50, **UNTIMED)
hypothesis.settings.register_profile("explore", max_examples=1000, **UNTIMED)
hypothesis.settings.load_profile("default")


# Another Triton than 3.9 (torch may bring one along on Python 3.10) is none: its tests are skipped.
if not triton_version().startswith("3.9."):
    sys.modules["triton"] = None  # type: ignore[assignment]


def pytest_configure(config: pytest.Config) -> None:
    """Workers of pytest-xdist share the cores; a worker with torch's own pool of threads would take them all."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
    keep_kernels(config)


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for garbage seldom, and never among what was collected: 700,000 objects that stay. With Python's thresholds
    that was a sixth of what compiling and simulating take."""
    gc.disable()
    yield
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


def pytest_unconfigure() -> None:
    """Python's exit frees all."""
    gc.unfreeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is no Hopper GPU, and say so."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU of capability 9.0")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def unread_scales(monkeypatch) -> None:
    """No rule reads the values of scales, as it is for tensors on a card."""
    for module in ("problem.eight_bit", "sequences.paged"):
        monkeypatch.setattr(f"warpattn.{module}.check_scale_values", lambda *given: None)
