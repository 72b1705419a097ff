"""Workspace and grids of NVIDIA's backward launches, by hand."""

import pytest

pytest.importorskip("triton")

from tests.sim.backward import Case, launches_of


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_workspace(arch: str) -> None:
    """A sequence of 300 rows has 384, tiles of 128; numbers of a tile's turns and sums of sinks are of 32 rows."""
    prepare, main, finish = launches_of(Case(300, 70, dim=72, arch=arch, sinks=True, deterministic=True, batch=3))
    made, heads = prepare.args["made"], 3 * prepare.args["shape"].heads_q
    assert made.shift.shape == made.delta.shape == (heads, 384)
    assert made.dq.shape == (heads, 384, 72)
    assert made.turns.shape == made.dsinks.shape == (heads, 12)
    assert main.args["turns"].pointer is made.turns and main.args["numbers"] == (made.shift, made.delta)
    assert finish.args["sums"] == (made.dq, made.dsinks)
    assert prepare.grid == finish.grid == (12, heads)


def test_what_a_call_does_not_need_is_not_there() -> None:
    prepare, *_ = launches_of(Case(300, 70, dim=64))
    assert prepare.args["made"].turns is None and prepare.args["made"].dsinks is None
