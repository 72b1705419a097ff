"""The smoke tests of bench.frameworks for diffusers and SGLang, whose Triton backend needs a card.

Those of transformers are in tests/unit/integrations/transformers/test_bench_frameworks.py.
"""

from __future__ import annotations

import importlib.util
import json

import pytest

from bench.frameworks.__main__ import main

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("framework", "count", "peer", "status"), [("diffusers", 2, "native", "timed"), ("sglang", 4, "triton", "failed")]
)
def test_smoke(tmp_path, framework, count, peer, status):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    path = tmp_path / "record.json"
    assert main(["--smoke", "--only", framework, "--rounds", "1", "--json", str(path)]) == 0
    cases = json.loads(path.read_text())["cases"].values()
    found = [{name: one["status"] for name, one in case["results"].items()} for case in cases]
    assert found == [{peer: status, "warpattn": "timed"}] * count
