"""Attention over ranks against the whole: rings, heads exchanged for rows, both on a mesh, caches of shared pages."""

from pathlib import Path

import pytest

from tests.unit.distributed import jobs, paged, torch_context
from tests.unit.distributed.world import failures


def test_ranks_have_the_values_and_gradients_of_the_whole(tmp_path: Path):
    found = failures([*torch_context.jobs(), *paged.jobs(), *jobs.jobs()], tmp_path)
    assert not found, "\n\n".join(found)


@pytest.mark.full
def test_every_case_in_every_way(tmp_path: Path):
    found = failures(jobs.more_jobs(), tmp_path)
    assert not found, "\n\n".join(found)
