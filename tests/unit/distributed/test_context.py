"""Attention over ranks against the whole: rings, heads exchanged for rows, both on a mesh, caches of shared pages."""

from pathlib import Path

from tests.unit.distributed import jobs, paged, torch_context
from tests.unit.distributed.world import failures


def test_ranks_have_the_values_and_gradients_of_the_whole(tmp_path: Path):
    found = failures([*torch_context.jobs(), *paged.jobs(), *jobs.jobs()], tmp_path)
    assert not found, "\n\n".join(found)
