"""Benchmarks that compile in several processes."""

import os
from functools import partial

import pytest

from bench.measure import workers


def test_jobs_of_processes_that_fail_have_no_entry(capfd):
    fine, raises, dies = partial(partial, dict, x=1), partial(int, "x"), partial(os._exit, 3)
    assert dict(workers.run([fine, dies, raises], 2)) == {0: {"x": 1}, 1: None, 2: None}
    assert "ValueError: invalid literal" in capfd.readouterr().err


@pytest.mark.full
def test_nothing_is_prepared_when_patience_has_ended():
    assert dict(workers.run([partial(partial, dict, x=1)], 1, 0.0)) == {0: None}
