"""The drafts of `bench.engine`, and what its record says of an engine."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

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
