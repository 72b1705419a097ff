"""Decode of latent attention (MLA, absorbed) on a card: values, determinism, plans, graphs whose lengths change."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import warpattn as wa
from tests.sim.sm90.decode import error
from tests.sim.sm90.mla import SCALE, Inputs, Latent, tensors
from warpattn.masks import Causal, SlidingWindow
from warpattn.scores import SoftCap
from warpattn.sequences import PagedKV

pytestmark = pytest.mark.gpu

MIXED = (4000, 1, 0, 129, 64, 8191)
CASES = {
    "dense": Latent((16384,)),
    "dense-batch": Latent((2000,) * 32, heads=128),
    "dense-few-keys": Latent((70,) * 3, heads=32, tokens=2, mask=Causal()),
    "mixed-64": Latent(MIXED, page=64, heads=64),
    "mixed-16-group-128": Latent(MIXED, page=16, heads=128, tokens=2, mask=Causal()),
    "mixed-128-fp16": Latent(MIXED, page=128, heads=20, tokens=4, mask=Causal(), dtype=torch.float16),
    "mixed-8": Latent(MIXED, page=8),
    "gathered": Latent(MIXED, page=3, heads=32),
    "window-sinks": Latent(MIXED, page=32, tokens=3, mask=SlidingWindow(700), sinks=True),
    "soft-cap": Latent(MIXED, page=64, score=SoftCap(5.0)),
    "16-tokens": Latent((3000, 20), page=64, heads=16, tokens=16, mask=Causal()),
    "many": Latent(tuple(1 + 61 * b % 700 for b in range(1200)), page=64),
}


def call(x: Inputs, case: Latent) -> tuple[Tensor, Tensor]:
    """Out and lse of the public call; the output starts as NaN."""
    out = torch.full((*x.q.shape[:3], 512), float("nan"), dtype=case.dtype, device="cuda")
    tail = {"mask": case.mask, "score": case.score, "sinks": x.sinks, "scale": SCALE, "return_lse": True, "out": out}
    if isinstance(x.sequence, PagedKV):
        return wa.attention_paged(x.q, x.sequence, **tail)
    return wa.attention(x.q, x.k, x.v, **tail)


def check(found: tuple[Tensor, Tensor], x: Inputs, case: Latent) -> None:
    out, lse = found
    want, want_lse = x.expected(case)
    assert error(out.float(), want.float()) < (2e-2 if case.dtype == torch.bfloat16 else 3e-3)
    assert error(lse, want_lse) < 1e-3


@pytest.mark.parametrize("name", CASES)
def test_values(name):
    case = CASES[name]
    x = tensors(case, device="cuda")
    for _ in range(3):
        check(call(x, case), x, case)


@pytest.mark.parametrize("name", ["dense", "mixed-64"])
def test_the_same_bits_every_time(name):
    x = tensors(CASES[name], device="cuda")
    out, lse = call(x, CASES[name])
    for _ in range(16):
        again = call(x, CASES[name])
        assert torch.equal(again[0], out) and torch.equal(again[1], lse)


def planned(x: Inputs, case: Latent, **options: bool) -> wa.DecodePlan:
    tail = {"mask": case.mask, "score": case.score, "sinks": x.sinks, "scale": SCALE, "return_lse": True}
    return wa.DecodePlan(x.q, x.sequence, **tail, **options)


def test_batch_invariance():
    alone = Latent((9000,), page=64, heads=64)
    x = tensors(alone, device="cuda")
    out, lse = (t.clone() for t in planned(x, alone, batch_invariant=True)(x.q, x.sequence))
    check((out, lse), x, alone)
    company = replace(alone, lengths=(9000, 12000, 5, 0, 4096, 333), seed=1)
    y = tensors(company, first=tensors(replace(alone, page=0)), device="cuda")
    many = planned(y, company, batch_invariant=True)(y.q, y.sequence)
    check(many, y, company)
    assert torch.equal(many[0][0], out[0]) and torch.equal(many[1][0], lse[0])


def test_one_graph_serves_every_step():
    """A captured plan follows the lengths."""
    case = CASES["mixed-64"]
    x = tensors(case, device="cuda")
    full = x.sequence.lengths.clone()
    plan = planned(x, case)
    plan(x.q, x.sequence)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = plan(x.q, x.sequence)
    for step in range(8):
        x.sequence.lengths.copy_((full * (step + 1)) // 8)
        plan.out.fill_(float("nan"))
        graph.replay()
        check(found, x, case)


def test_values_of_their_own_are_refused_every_time():
    """Also by what remembers a call whose values were columns of its keys."""
    case = CASES["mixed-64"]
    x = tensors(case, device="cuda")
    plan = planned(x, case)
    for _ in range(2):
        check(call(x, case), x, case)
    other = torch.randn_like(x.k)[..., :512]
    wrong = replace(x, v=other, sequence=replace(x.sequence, v_pages=other))
    with pytest.raises(wa.AttentionError, match="must be the view"):
        call(wrong, case)
    with pytest.raises(wa.AttentionError, match="first columns of the keys"):
        plan(wrong.q, wrong.sequence)


def narrow_pages(lengths: tuple[int, ...], page: int, device: str) -> wa.LatentPages:
    """Random latents of 8 bits with a scale for 128 columns, rotary parts in bf16, pages in another order."""
    counts = [-(-n // page) for n in lengths]
    order = torch.randperm(sum(counts), device=device).int().split(counts)
    table = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True)
    wide = torch.randn(sum(counts), page, 1, 576, device=device)
    stored = wa.quantize(wide[..., :512], torch.float8_e4m3fn, per=128)
    ends = torch.tensor(lengths, dtype=torch.int32, device=device)
    return wa.LatentPages(stored.values, wide[..., 512:].bfloat16(), table, ends, scale=stored.scale)


@pytest.mark.parametrize(("heads", "tokens", "page"), [(16, 1, 64), (8, 2, 16), (3, 5, 8), (64, 1, 64), (20, 3, 16)])
def test_latents_of_8_bits(heads, tokens, page):
    """Up to 16 rows of queries and more, which are two kernels."""
    torch.manual_seed(heads)
    kv = narrow_pages(MIXED, page, "cuda")
    q = torch.randn(len(MIXED), tokens, heads, 576, device="cuda").bfloat16()
    tail = {"mask": Causal(), "scale": SCALE, "return_lse": True}
    want, want_lse = wa.attention_paged(q, kv, **tail, backend="reference")
    for _ in range(3):
        out, lse = wa.attention_paged(q, kv, **tail)
        assert error(out.float(), want.float()) < 2e-2 and error(lse, want_lse) < 1e-2
