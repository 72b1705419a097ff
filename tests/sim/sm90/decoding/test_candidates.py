"""Configurations that `tune` may choose for decode, in the simulator: each gives the reference's values, and those of
the built-in one but for what `tune` takes for rounding."""

from functools import cache

import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from tests.drawn import drawn
from warpattn.problem.launch import BUILT_IN, PlanOptions
from warpattn.runtime.launches import filled_problem, list_launches
from warpattn.runtime.simulate import Options, run_launch
from warpattn.runtime.tuned import table
from warpattn.serving.call_shape import CallShape
from warpattn.serving.layers import Layer
from warpattn.serving.tuning import difference

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


@cache
def simulated(shape: str, name: str) -> torch.Tensor:
    """The output of a configuration."""
    call = SHAPES[shape].drawn(torch.device("cpu"), 0)
    call.operands.out.fill_(torch.nan)
    for launch in list_launches(call.checked, call.operands, call.sequence, PlanOptions(candidate=name)):
        report = run_launch(launch, Options("lazy"))
        assert report.clean, report
    return call.operands.out


@pytest.mark.parametrize(("shape", "name"), drawn(NAMES, NAMES[3:4]))
def test_every_configuration_is_right(shape: str, name: str) -> None:
    call = SHAPES[shape].drawn(torch.device("cpu"), 0)
    q, k, v, *_ = call.operands
    mask = SHAPES[shape].call_mask
    if SHAPES[shape].page_size:
        want = wa.attention_paged(q, call.sequence, mask=mask, backend="reference")
    else:
        want = wa.attention(q, k, v, mask=mask, backend="reference")
    out = simulated(shape, name)
    torch.testing.assert_close(out, want, atol=0.03, rtol=0.03)
    assert difference(out, simulated(shape, BUILT_IN)) == ""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_tile_of_keys_that_is_left_out_is_wrong(dtype: torch.dtype) -> None:
    """With the inputs that `tune` draws; with queries of ordinary size its share of a row would be that of noise."""
    shape = CallShape(Layer(4, 4, 64, 64, dtype), 1, 64, 4096, mask=wa.Full())
    q, k, v, *_ = shape.drawn(torch.device("cpu"), 0).operands
    want = wa.attention(q, k, v, backend="reference")
    fewer = wa.attention(q, k[:, 64:], v[:, 64:], backend="reference")
    assert "differs" in difference(fewer, want)
    in_parts = wa.merge_states(
        [wa.attention(q, k[:, part], v[:, part], return_lse=True, backend="reference")
         for part in (slice(0, 1000), slice(1000, None))]
    )[0]  # fmt: skip
    assert difference(in_parts.to(dtype), want) == ""
