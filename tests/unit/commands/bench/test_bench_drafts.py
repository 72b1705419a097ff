"""The drafts of `bench.engine`, and options that only vLLM has."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from bench.engine import __main__ as engines
from bench.engine.drafts import NGrams


@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5]),
        ([1, 2, 9, 1, 2, 3, 1, 2], [3, 1, 2]),  # after the last place
        ([1, 2, 3, 1, 2], [3, 1, 2]),
        ([7, 7, 7, 7], [7, 7, 7]),
        ([1, 2, 9], [9, 9, 9]),
        ([4, 5], [5, 5, 5]),
        ([5], [5, 5, 5]),
    ],
)
def test_drafts_of_n_grams(text, drafts):
    proposer = NGrams(SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=3)))
    row = np.array([*text, 0, 0, 0])
    lengths = np.array([len(text), len(text)])
    assert proposer.propose([[text[-1]], []], lengths, np.stack([row, row]), slot_mappings=None) == [drafts, []]


@pytest.mark.parametrize("option", ["--captured 64", "--step-tokens 64", "--drafts 1", "--inductor", "--profile mixed"])
def test_sglang_has_no_options_of_vllm(option, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench.engine", "--engine", "sglang", *option.split()])
    with pytest.raises(SystemExit):
        engines.main()
    assert f"and none of {', '.join(f'--{name}' for name in VLLM)}" in capsys.readouterr().err


VLLM = ("profile", "inductor", "captured", "step-tokens", "drafts")
