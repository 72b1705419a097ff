"""vLLM's backend against the stand-in, for the tests of its steps."""

import importlib
import sys

import pytest

from tests.unit.integrations import vllm_double


@pytest.fixture
def vllm(monkeypatch):
    """The backend's package, imported against the stand-in."""
    vllm_double.install(monkeypatch)
    return importlib.import_module("warpattn.integrations.vllm")


@pytest.fixture
def runs(vllm, monkeypatch):
    """The same where kernels take no ragged queries over pages."""
    monkeypatch.setattr(sys.modules["warpattn.integrations.vllm.metadata"], "takes_ragged_pages", lambda device: False)
    return vllm
