"""vLLM's backend against the stand-in, for the tests of its steps."""

import importlib

import pytest

from tests.unit.integrations import vllm_double
from warpattn.integrations import step_plans


@pytest.fixture
def vllm(monkeypatch):
    """The backend's package, imported against the stand-in, whose prompts are short ones."""
    vllm_double.install(monkeypatch)
    monkeypatch.setattr(step_plans, "PROMPT_TOKENS", 1)
    return importlib.import_module("warpattn.integrations.vllm")
