"""Steps where kernels take no ragged queries over pages: neighbours that one call serves, found once a step.

    requests     0    1    2    3         4
    new tokens   1    1    1    300       128
    context    812   77  501      0      1024
               └─ one paged ─┘  varlen   paged     ◄─ `Run`s, from what vLLM keeps on the host

Neighbours with equally many new tokens are one call of `attention_paged`; neighbours without context (fresh prompts)
are one call of `attention_varlen` on the keys at hand.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from torch import Tensor


class Run(NamedTuple):
    """Neighbouring requests that one call serves."""

    requests: slice
    tokens: slice
    length: int  # new tokens of each request; of the longest one in a fresh run
    offsets: Tensor | None = None  # fresh run: where its requests start, int32 [requests + 1], from 0
    parts: tuple[Run, ...] = ()  # fresh run: the same as runs of equal lengths, for layers that must read the cache


def find_runs(common: Any) -> tuple[Run, ...]:
    """The runs of a batch, from the host's copies of its offsets and of upper bounds of its lengths."""
    starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
    bounds = getattr(common, "seq_lens_cpu_upper_bound", None)
    longest = [None] * common.num_reqs if bounds is None else bounds[: common.num_reqs].tolist()
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    fresh = [length > 0 and bound == length for length, bound in zip(lengths, longest, strict=True)]
    runs: list[Run] = []
    for is_fresh, group in itertools.groupby(range(common.num_reqs), key=lambda r: fresh[r]):
        requests = list(group)
        equal = _equal_runs(requests, lengths, starts)
        if not is_fresh:
            runs += equal
            continue
        rows = slice(requests[0], requests[-1] + 1)
        offsets = common.query_start_loc[rows.start : rows.stop + 1] - starts[rows.start]
        tokens = slice(starts[rows.start], starts[rows.stop])
        runs.append(Run(rows, tokens, max(lengths[r] for r in requests), offsets, tuple(equal)))
    return tuple(runs)


def _equal_runs(requests: list[int], lengths: list[int], starts: list[int]) -> list[Run]:
    """Runs of equally many new tokens; requests without any (padding of a batch) need no run."""
    runs = []
    for length, group in itertools.groupby(requests, key=lambda r: lengths[r]):
        rows = list(group)
        if length:
            requests_of_run = slice(rows[0], rows[-1] + 1)
            runs.append(Run(requests_of_run, slice(starts[rows[0]], starts[rows[-1] + 1]), length))
    return runs
