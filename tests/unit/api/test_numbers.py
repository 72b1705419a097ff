"""The reference against the oracle of special values: what is hidden reaches nothing, what is visible is not lost."""

from dataclasses import replace

import pytest
import torch

from tests.cases import MASKS, SCORES, Case
from tests.drawn import each_once
from tests.specials import SPOILS, spoiled, unlike
from warpattn import AttentionError, Causal, Hadamard, attention
from warpattn.reference import reference

KINDS = {
    "dense": Case(batch=2, seq_q=37, seq_k=45, heads_q=4, heads_kv=2, dim=16),
    "ragged": Case(kind="ragged", batch=3, lens_q=(5, 17, 9), lens_k=(19, 3, 30), heads_q=2, heads_kv=1, dim=16),
    "paged": Case(kind="paged", batch=3, seq_q=7, lens_k=(33, 0, 4), page_size=16, heads_q=2, heads_kv=2, dim=16),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LAYOUTS = ("contiguous", "heads-first", "sliced")
DRAWN = each_once(tuple(MASKS), tuple(SCORES), tuple(KINDS), DTYPES, LAYOUTS, tuple(SPOILS), (True, False, False))


@pytest.mark.parametrize(("mask", "score", "kind", "dtype", "layout", "how", "sinks"), DRAWN)
def test_the_reference_follows_the_rule(mask, score, kind, dtype, layout, how, sinks):
    inputs = spoiled(replace(KINDS[kind], mask=mask, score=score, dtype=dtype, layout=layout, sinks=sinks), how)
    tail = {"sequence": inputs.sequence, "mask": inputs.mask, "score": inputs.score, "sinks": inputs.sinks}
    found = reference(inputs.q, inputs.k, inputs.v, **tail)
    assert not unlike(found, inputs, 1e-4)


@pytest.mark.parametrize("how", SPOILS)
@pytest.mark.parametrize("mask", ["causal", "window-both", "dense-mask", "causal-padding", "nothing", "causal-added"])
def test_every_special_value_under_masks(mask, how):
    inputs = spoiled(replace(KINDS["dense"], mask=mask, score="bias", sinks=True), how)
    found = reference(inputs.q, inputs.k, inputs.v, mask=inputs.mask, score=inputs.score, sinks=inputs.sinks)
    assert not unlike(found, inputs, 1e-4)


def test_scales_beyond_fp32_are_refused():
    q = torch.zeros(1, 1, 1, 8)
    for scale in (1e39, 10**400, -1e300):
        with pytest.raises(AttentionError, match="a finite number of fp32"):
            attention(q, q, q, scale=scale)


def test_a_region_of_autocast_rounds_nothing():
    """Products of torch would be in bf16 there."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 50, 2, 32, requires_grad=True) for _ in range(3))
    wanted, rotated = attention(q, k, v, mask=Causal()), Hadamard().applied(q.detach())
    with torch.autocast("cpu", torch.bfloat16):
        found = attention(q, k, v, mask=Causal())
        assert torch.equal(Hadamard().applied(q.detach()), rotated)
    for a, b in zip(*((out, *torch.autograd.grad(out.sum(), [q, k, v])) for out in (found, wanted)), strict=True):
        assert torch.equal(a, b)
