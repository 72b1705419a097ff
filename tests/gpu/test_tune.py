"""`tune` on a card: candidates are timed, the fastest is used from the next call on, and its values are right."""

import math

import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from warpattn.problem.launch import BUILT_IN
from warpattn.runtime import execute
from warpattn.runtime.tuned import rows, table

pytestmark = pytest.mark.gpu

LAYER = wa.Layer(8, 2, 128, 128)
SHAPES = {
    "prefill": wa.CallShape(LAYER, 2, 1500, 1500),
    "few queries": wa.CallShape(LAYER, 1, 64, 5000),
    "decode": wa.CallShape(LAYER, 4, 1, 3000),
    "pages": wa.CallShape(LAYER, 4, 1, 3008, 16),
}


@pytest.fixture(autouse=True)
def _no_rows(monkeypatch, tmp_path):
    """Nothing was tuned before, and nothing is kept; compiled kernels are those of all tests."""
    monkeypatch.setattr(rows, "path", lambda: tmp_path / "cache" / rows.FOLDER / rows.FILE)
    monkeypatch.setattr(table.TABLE, "rows", None)
    yield
    execute.forget()


@pytest.mark.parametrize("name", SHAPES)
def test_the_fastest_is_used_and_right(name):
    shape = SHAPES[name]
    (found,) = wa.tune([shape], rounds=3)
    row = found.row
    assert row is not None and not row.refused and all(0 < us < math.inf for us in row.microseconds.values())
    assert set(row.microseconds) == {BUILT_IN, *table.configurations(problem_of(shape)).others}
    assert row.gain >= 1.0
    call = shape.drawn(torch.device("cuda"), 1)
    q, k, v = call.operands[:3]
    if shape.page_size:
        out = wa.attention_paged(q, call.sequence, mask=wa.Causal())
        want = wa.attention_paged(q, call.sequence, mask=wa.Causal(), backend="reference")
    else:
        out = wa.attention(q, k, v, mask=wa.Causal())
        want = wa.attention(q, k, v, mask=wa.Causal(), backend="reference")
    torch.testing.assert_close(out.float(), want.float(), atol=0.03, rtol=0.03)


def problem_of(shape):
    return shape.planned().checked.problem
