"""vLLM's backend against the stand-in, for the tests of its steps."""

import importlib

import pytest

from tests.unit.integrations import vllm_double


@pytest.fixture
def vllm(monkeypatch):
    """The backend's package, imported against the stand-in."""
    vllm_double.install(monkeypatch)
    return importlib.import_module("warpattn.integrations.vllm")
