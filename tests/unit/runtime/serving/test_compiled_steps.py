"""Steps inside of torch.compile: sizes that torch keeps open, scales, and plans, which end a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import warpattn as wa

LENGTHS, CU_Q = torch.tensor([20, 5], dtype=torch.int32), torch.tensor([0, 1, 4], dtype=torch.int32)


def cache_of(pages: Tensor, table: Tensor, k_scale: Tensor | None = None) -> wa.PagedKV:
    return wa.PagedKV(pages, pages, table, LENGTHS, k_scale=k_scale)


def batch(q: Tensor, *cache: Tensor) -> Any:
    return wa.attention_paged(q[:2, None], cache_of(*cache), mask=wa.Causal(), return_lse=True)


def ragged(q: Tensor, *cache: Tensor) -> Any:
    return wa.attention_paged(q, cache_of(*cache), wa.Ragged(CU_Q, max_q=3), mask=wa.Causal(), return_lse=True)


@pytest.mark.parametrize("eight_bit", [False, True], ids=["16 bits", "8 bits"])
@pytest.mark.parametrize("call", [batch, ragged])
def test_sizes_that_torch_keeps_open(call: Any, eight_bit: bool) -> None:
    torch._dynamo.reset()
    fn = torch.compile(call, fullgraph=True, dynamic=True, backend="eager")
    for width in (2, 3):
        x = torch.randn(2 * width, 16, 2, 32)
        each = wa.quantize(x, per="token")
        cache = (each.values, torch.arange(2 * width, dtype=torch.int32).view(2, -1), each.scale)
        cache = cache if eight_bit else (x, cache[1])
        q = torch.randn(4, 4, 32)
        torch.testing.assert_close(fn(q, *cache), call(q, *cache))


@pytest.mark.parametrize("per", ["tensor", "head", "token", 64])
def test_values_of_8_bits_times_scales(per: str | int) -> None:
    def there_and_back(x: Tensor) -> Tensor:
        return wa.quantize(x, scale=wa.quantize(x, per=per).scale).dequantized()

    torch._dynamo.reset()
    x = torch.randn(3, 5, 2, 64)
    fn = torch.compile(there_and_back, fullgraph=True, dynamic=True, backend="eager")
    assert torch.equal(fn(x), there_and_back(x))


def steps(q: Tensor) -> dict[str, Any]:
    pages, table = torch.randn(4, 16, 2, 32), torch.arange(4, dtype=torch.int32).view(2, 2)
    kv, seq = cache_of(pages, table), wa.Ragged(torch.tensor([0, 1, 2], dtype=torch.int32))
    step: Any = wa.StepPlan(q, kv, seq)
    prefill: Any = wa.PrefillPlan(q, q, q, seq)
    decode: Any = wa.DecodePlan(q[:, None], kv)
    return {
        "decode": lambda q: decode(q[:, None], kv) + 1,
        "prefill": lambda q: prefill(q, q, q, seq) + 1,
        "step": lambda q: step(q, kv, seq) + 1,
        "update": lambda q: (step.update(seq.cu_q, LENGTHS, table), step.kv.lengths + q.sum())[1],
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["decode", "prefill", "step", "update"])
def test_plans_end_a_graph(name: str) -> None:
    q = torch.randn(2, 2, 32)
    call = steps(q)[name]
    torch._dynamo.reset()
    with pytest.raises(Exception, match="a plan writes addresses, which a graph cannot hold; call it outside"):
        torch.compile(call, fullgraph=True, backend="eager")(q)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(call, backend="eager")(q), call(q))
