"""A launch of a pair of CTAs, up to the driver call. Its grid counts clusters, its boxes are those of one CTA.

No plan chooses pairs yet; a choice of `pair_choice` is launched like any other. The machine code says itself
`.reqnctapercluster`, so the launch needs no attribute.
"""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.unit.runtime.test_dispatch import Driver, driver  # noqa: F401  a fixture
from warpattn.kernels.sm100.prefill_2cta.config import pair_choice
from warpattn.kernels.sm100.prefill_2q.config import prefill_config
from warpattn.kernels.sm100.select import launches_of_choice
from warpattn.problem import Call, validate
from warpattn.problem.launch import Launch
from warpattn.problem.operands import Operands
from warpattn.runtime.bound_launches import launch_all
from warpattn.sequences import Dense


def pair_launch(rows: int, heads: int) -> Launch:
    """The launch of a problem with the pair kernel; tile rows are 2 x 256."""
    q = torch.randn(2, rows, heads, 128).bfloat16()
    ready = validate(Call(q, q, q, Dense(), return_lse=True, backend="simulate:sm100"))
    config = replace(prefill_config(ready.problem)[0], pair_cta=True, max_qk_stages=None)
    x = Operands(q, q, q, torch.empty_like(q), torch.empty(ready.lse_shape), None)
    (step,) = launches_of_choice(ready, x, Dense(), pair_choice(ready.problem, config))
    return step


def test_the_grid_of_a_pair_counts_clusters() -> None:
    step = pair_launch(1100, 3)
    assert step.options["num_ctas"] == 2
    assert step.grid == (3, 3, 2), "512 rows a cluster, heads, batch"


def test_a_pair_reaches_the_driver(driver: Driver) -> None:  # noqa: F811
    step = pair_launch(1100, 3)
    launch_all((step,), -1)
    (launched,) = driver.launches
    assert launched[1:4] == (6, 3, 2), "CTAs"
    boxes = [layout.box for layout in driver.maps]
    assert boxes == [(1, 128, 1, 64), (1, 64, 1, 64), (1, 128, 1, 64), (1, 128, 1, 64)], "of one CTA: Q, K, V, output"
