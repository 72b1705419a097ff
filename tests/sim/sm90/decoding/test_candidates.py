"""Configurations that `tune` may choose for decode, in the simulator: each gives the reference's values."""

import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from warpattn.problem.launch import PlanOptions
from warpattn.runtime.plan import filled_problem, list_launches
from warpattn.runtime.simulate import Options, run_launch
from warpattn.runtime.tuned import table
from warpattn.serving.call_shape import CallShape
from warpattn.serving.layers import Layer

# Over pages, dense with few keys, where prefill takes them, too, and of many rows without swap-AB.
SHAPES = {
    "pages": CallShape(Layer(8, 2, 64, 64), 2, 1, 1040, 16),
    "dense": CallShape(Layer(4, 4, 128, 128), 1, 2, 777),
    "rows": CallShape(Layer(16, 1, 64, 64, window=300), 1, 3, 640),
}
NAMES = [
    (shape, name)
    for shape, call in SHAPES.items()
    for name in table.configurations(filled_problem(call.planned().checked.problem)).others
]


@pytest.mark.parametrize(("shape", "name"), NAMES)
def test_every_configuration_is_right(shape: str, name: str) -> None:
    call = SHAPES[shape].drawn(torch.device("cpu"), 0)
    q, k, v, out, _, _ = call.operands
    out.fill_(torch.nan)
    for launch in list_launches(call.checked, call.operands, call.sequence, PlanOptions(candidate=name)):
        report = run_launch(launch, Options("lazy"))
        assert report.clean, report
    mask = SHAPES[shape].call_mask
    if SHAPES[shape].page_size:
        want = wa.attention_paged(q, call.sequence, mask=mask, backend="reference")
    else:
        want = wa.attention(q, k, v, mask=mask, backend="reference")
    torch.testing.assert_close(out, want, atol=0.03, rtol=0.03)
