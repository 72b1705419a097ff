"""Drafts for vLLM's engines that need no model: what followed a request's last two tokens before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class NGrams:
    """A proposer as vLLM makes one of the path in `speculative_config`; every request gets all its drafts."""

    def __init__(self, config: Any) -> None:
        self.drafts = config.speculative_config.num_speculative_tokens

    def propose(self, sampled: Sequence[list[int]], lengths: Any, tokens: Any, **_: Any) -> list[list[int]]:
        """For each request that got a token: `tokens` [requests, longest] holds `lengths` of each."""
        rows = zip(sampled, lengths, tokens, strict=False)
        return [self.after(row[:length]) if new else [] for new, length, row in rows]

    def after(self, text: np.ndarray) -> list[int]:
        """What followed the last place where the text's two last tokens were, or the last token again."""
        found = np.flatnonzero((text[:-2] == text[-2]) & (text[1:-1] == text[-1])) if len(text) > 2 else []
        follows = text[found[-1] + 2 :][: self.drafts].tolist() if len(found) else []
        return follows + [int(text[-1])] * (self.drafts - len(follows))
