"""The reference against plain PyTorch in fp64, with masks evaluated for every pair of query and key.

In fp64 the two differ by rounding only (1e-10), so that a wrong tile, span, head or sink cannot hide in a tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tests import cases, oracle
from tests.cases import Case
from tests.drawn import drawn
from warpattn import reference as module
from warpattn.api import attention, attention_paged, attention_varlen
from warpattn.language.expr import where
from warpattn.masks import Causal, Document, Full, Mask, Materialized, Padding, SlidingWindow, Span
from warpattn.reference import reference
from warpattn.scores import ALiBi, Bias, SoftCap
from warpattn.sequences import PagedKV, Ragged

BASE = Case(dtype=torch.float64)
EVERY = [
    *cases.every_mask(BASE),
    *cases.every_mask(replace(BASE, seq_q=23, seq_k=57, sinks=True)),
    *cases.every_mask(replace(BASE, batch=1, seq_q=57, seq_k=23)),
    *cases.every_score(replace(BASE, mask="causal", seq_q=31)),
    *cases.every_combination(BASE),
    *cases.every_head_count(replace(BASE, mask="causal-window", score="alibi", dim_v=24)),
    *cases.every_length(replace(BASE, mask="causal"), 16),
    *cases.every_length(replace(BASE, sinks=True, score="softcap"), 16),
    *cases.every_layout(replace(BASE, mask="documents")),
    *[case for mask in cases.MASKS for case in cases.ragged(replace(BASE, mask=mask))],
    *[case for score in cases.SCORES for case in cases.ragged(replace(BASE, score=score, sinks=True))],
    *cases.paged(replace(BASE, mask="causal")),
    *[replace(case, mask=mask) for mask in cases.MASKS for case in cases.paged(BASE)[1:2]],
    *[replace(case, score=score, sinks=True) for score in cases.SCORES for case in cases.paged(BASE)[2:3]],
    *cases.paged(replace(BASE, layout="heads-first", scale=0.3)),
]


def run(inputs: oracle.Inputs, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference on the inputs of a case."""
    return reference(
        inputs.q,
        inputs.k,
        inputs.v,
        sequence=inputs.sequence,
        mask=inputs.mask,
        score=inputs.score,
        sinks=inputs.sinks,
        scale=inputs.scale,
        dtype=dtype,
    )


def call(inputs: oracle.Inputs, **options: object) -> object:
    """The function of the api that takes the inputs of a case."""
    tail = {"mask": inputs.mask, "score": inputs.score, "sinks": inputs.sinks, "scale": inputs.scale} | options
    if isinstance(inputs.sequence, PagedKV):
        return attention_paged(inputs.q, inputs.sequence, **tail)
    if isinstance(inputs.sequence, Ragged):
        return attention_varlen(inputs.q, inputs.k, inputs.v, inputs.sequence, **tail)
    return attention(inputs.q, inputs.k, inputs.v, **tail)


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 16 rows and 16 keys: short sequences then have many, and the spans' parts are all used."""
    monkeypatch.setattr(module, "TILE_KEYS", 16)
    monkeypatch.setattr(module, "TILE_SCORES", 16)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in dict.fromkeys(EVERY)])
def test_reference_is_the_plain_formula(case, small_tiles):
    inputs = case.build()
    out, lse = run(inputs)
    truth, true_lse = oracle.plain(inputs, torch.float64)
    oracle.compare(out, truth, 1e-10)
    assert lse.shape == true_lse.shape and lse.dtype == torch.float64
    torch.testing.assert_close(lse, true_lse, rtol=0, atol=1e-10)


@pytest.mark.parametrize("mask", ["full", "causal", "dense-mask"])
def test_the_plain_formula_is_sdpa(mask):
    inputs = replace(BASE, mask=mask, seq_q=33, seq_k=48).build()
    truth, _ = oracle.plain(inputs, torch.float64)
    keep = torch.stack([oracle.visible(inputs, b, range(33), 33, 48) for b in range(2)])
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    with sdpa_kernel(SDPBackend.MATH):
        out = scaled_dot_product_attention(q, k, v, attn_mask=keep, enable_gqa=True).transpose(1, 2)
    seen = keep.any(-1).transpose(1, 2)
    torch.testing.assert_close(out[seen], truth[seen], rtol=0, atol=1e-12)
    assert (truth[~seen] == 0).all()


def test_full_sized_tiles_give_the_same():
    case = Case(batch=1, seq_q=600, seq_k=1100, heads_q=2, heads_kv=1, mask="causal-window", dtype=torch.float64)
    for mask in ("causal-window", "documents", "not-window", "full"):
        inputs = replace(case, mask=mask).build()
        out, lse = run(inputs)
        truth, true_lse = oracle.plain(inputs, torch.float64)
        oracle.compare(out, truth, 1e-10)
        torch.testing.assert_close(lse, true_lse, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["dense", "ragged", "paged"])
@pytest.mark.parametrize("score", ["none", "softcap-alibi"])
def test_api_is_within_the_tolerance_of_the_dtype(dtype, kind, score):
    base = Case(dtype=dtype, mask="causal", score=score, sinks=True, dim=32, dim_v=40)
    case = {"dense": base, "ragged": cases.ragged(base)[1], "paged": cases.paged(base)[2]}[kind]
    inputs = case.build()
    out = oracle.poisoned((*inputs.q.shape[:-1], 40), dtype)
    returned, lse = call(inputs, out=out, return_lse=True)
    assert returned is out and lse.dtype == torch.float32
    oracle.check(inputs, out, lse, truth_dtype=torch.float64)
    assert torch.equal(call(inputs), out)


def test_fp64_stays_fp64():
    inputs = replace(BASE, mask="causal").build()
    out, lse = call(inputs, return_lse=True)
    assert out.dtype == lse.dtype == torch.float64
    oracle.compare(out, oracle.plain(inputs, torch.float64)[0], 1e-10)


def test_out_may_have_any_strides():
    inputs = replace(BASE, mask="causal").build()
    wide = oracle.poisoned((2, 4, 70, 20), torch.float64)
    out = wide.transpose(1, 2)[..., :16]
    attention(inputs.q, inputs.k, inputs.v, mask=inputs.mask, out=out)
    oracle.compare(out, oracle.plain(inputs, torch.float64)[0], 1e-10)
    assert wide[..., 16:].isnan().all()


def test_masked_rows_and_missing_keys():
    q, k, v = (torch.randn(2, n, 2, 8) for n in (3, 5, 5))
    sinks = torch.tensor([0.5, -2.0])
    for keys, mask in ((k[:, :0], None), (k, ~Full()), (k[:, :0], Causal()), (k, Padding(torch.tensor([0, 0])))):
        values = v[:, : keys.shape[1]]
        out, lse = attention(q, keys, values, mask=mask, return_lse=True)
        assert (out == 0).all() and (lse == -torch.inf).all() and out.shape == q.shape
        out, lse = attention(q, keys, values, mask=mask, sinks=sinks, return_lse=True)
        assert (out == 0).all() and torch.equal(lse, sinks[None, :, None].expand(2, 2, 3))
    out, lse = attention(q[:, :0], k, v, return_lse=True)
    assert out.shape == (2, 0, 2, 8) and lse.shape == (2, 2, 0)


def test_no_sink_is_minus_infinity():
    inputs = replace(BASE, mask="dense-mask").build()
    out, lse = run(inputs)
    same, same_lse = run(replace(inputs, sinks=torch.full((4,), -torch.inf)))
    torch.testing.assert_close(same, out)
    torch.testing.assert_close(same_lse, lse)


def test_large_scores_do_not_overflow():
    q, k, v = (torch.randn(1, 40, 1, 8) * size for size in (200, 200, 1))
    inputs = oracle.Inputs(q, k, v, mask=Causal(), scale=1.0, sinks=torch.tensor([1e4]))
    out, lse = run(inputs, torch.float32)
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()
    truth, _ = oracle.plain(inputs, torch.float64)
    torch.testing.assert_close(out.double(), truth, rtol=0, atol=1e-2)


def test_nan_in_an_operand_is_not_hidden():
    q, k, v = (torch.randn(1, 6, 1, 8) for _ in range(3))
    k[0, 2] = torch.nan
    out, lse = attention(q, k, v, mask=Causal(), return_lse=True)
    assert torch.isfinite(out[0, :2]).all() and out[0, 2:].isnan().all() and lse[0, 0, 2:].isnan().all()


GRADIENTS = [
    Case(batch=1, seq_q=5, seq_k=6, heads_q=2, heads_kv=1, dim=3, dim_v=2, dtype=torch.float64, mask=mask, sinks=True)
    for mask in ("full", "causal", "dense-mask", "window-future", "causal-padding")
]
GRADIENTS += [replace(GRADIENTS[1], score=score) for score in ("softcap", "alibi", "custom", "bias-softcap")]
GRADIENTS += [replace(case, kind="ragged", batch=2, lens_q=(2, 3), lens_k=(4, 1)) for case in GRADIENTS[1:2]]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in GRADIENTS])
def test_gradients(case, small_tiles):
    inputs = case.build()
    leaves = [x.detach().double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v, inputs.sinks)]

    def function(q, k, v, sinks):
        return run(replace(inputs, q=q, k=k, v=v, sinks=sinks))

    def finite(q, k, v, sinks):
        out, lse = function(q, k, v, sinks)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    assert torch.autograd.gradcheck(finite, leaves)


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_of_captured_tensors(recompute, small_tiles, monkeypatch):
    if recompute:
        monkeypatch.setattr(module, "RECOMPUTE_FROM", 0)
    inputs = Case(batch=1, seq_q=20, seq_k=20, heads_q=2, heads_kv=2, dim=3, dtype=torch.float64).build()
    bias = torch.randn(2, 20, 20, dtype=torch.float64, requires_grad=True)
    slopes = torch.rand(2, dtype=torch.float64, requires_grad=True)
    added = torch.randn(1, 20, 20, dtype=torch.float64, requires_grad=True)

    def function(bias, slopes, added):
        mask = Materialized(added) & SlidingWindow(7)
        return run(replace(inputs, score=Bias(bias) | SoftCap(3.0) | ALiBi(slopes), mask=mask))

    def truth(bias, slopes, added):
        mask = Materialized(added) & SlidingWindow(7)
        score = Bias(bias) | SoftCap(3.0) | ALiBi(slopes)
        return oracle.plain(replace(inputs, score=score, mask=mask), torch.float64)

    wanted = torch.autograd.grad(truth(bias, slopes, added)[0].square().sum(), (bias, slopes, added))
    given = torch.autograd.grad(function(bias, slopes, added)[0].square().sum(), (bias, slopes, added))
    for a, b in zip(given, wanted, strict=True):
        assert b.abs().max() > 1e-3
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["dense", "ragged", "paged"])
def test_gradients_through_the_api_are_finite_where_rows_see_nothing(kind):
    base = Case(mask="dense-mask", dtype=torch.bfloat16)
    case = {"dense": base, "ragged": cases.ragged(base)[1], "paged": replace(cases.paged(base)[1], mask="causal")}[kind]
    inputs = case.build()
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    sequence = inputs.sequence
    if isinstance(sequence, PagedKV):
        sequence = PagedKV(leaves[1], leaves[2], sequence.block_table, sequence.lengths)
    out, lse = call(replace(inputs, q=leaves[0], k=leaves[1], v=leaves[2], sequence=sequence), return_lse=True)
    assert (lse == -torch.inf).any()
    (out.float().square().sum() + lse[lse != -torch.inf].sum()).backward()
    for x in leaves:
        assert x.grad is not None and torch.isfinite(x.grad).all() and (x.grad != 0).any()


def test_gradients_where_no_row_sees_a_key():
    q, k, v = (torch.randn(1, 4, 2, 8, requires_grad=True) for _ in range(3))
    attention(q, k, v, mask=~Full()).sum().backward()
    for x in (q, k, v):
        assert x.grad is not None and (x.grad == 0).all()


def test_recomputing_row_tiles_changes_nothing(small_tiles, monkeypatch):
    inputs = replace(BASE, mask="causal-window", score="softcap", sinks=True).build()
    grads = []
    for limit in (0, 1 << 60):
        monkeypatch.setattr(module, "RECOMPUTE_FROM", limit)
        leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v, inputs.sinks)]
        out, lse = run(replace(inputs, q=leaves[0], k=leaves[1], v=leaves[2], sinks=leaves[3]))
        grads.append(torch.autograd.grad(out.square().sum() + lse.sum(), leaves))
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_spans_skip_tiles(monkeypatch):
    """A window of 64 keys in 4,096 looks at about 64 + 512 keys per row, and not at 4,096."""
    seen = []
    original = module.key_tiles

    def counted(*span):
        tiles = list(original(*span))
        seen.extend(hi - lo for lo, hi, _ in tiles)
        return tiles

    monkeypatch.setattr(module, "key_tiles", counted)
    q, k, v = (torch.randn(1, 4096, 1, 8) for _ in range(3))
    reference(q, k, v, mask=SlidingWindow(64))
    assert sum(seen) <= 8 * (64 + 512)
    seen.clear()
    reference(q, k, v, mask=Causal())
    assert sum(seen) == sum(512 * tile for tile in range(1, 9))


@dataclass(frozen=True)
class EachHead(Mask):
    """Head h sees h + 1 keys; head 0 of sequence 1 sees none. Spans differ between heads and sequences."""

    def keep(self, b, h, q, k, lens=None):
        return (k <= q) & (k > q - 1 - h) & ((h > 0) | (b == 0))

    def kv_span(self, b, h, q_lo, q_hi, lens):
        last = where((h == 0) & (b == 1), 0, q_hi + 1)
        return Span(q_lo - h, where((h == 0) & (b == 1), last, q_hi - h), q_lo + 1, last)


def test_spans_that_differ_between_heads(small_tiles):
    inputs = replace(replace(BASE, heads_q=24, heads_kv=8).build(), mask=EachHead())
    out, lse = run(inputs)
    truth, true_lse = oracle.plain(inputs, torch.float64)
    oracle.compare(out, truth, 1e-10)
    torch.testing.assert_close(lse, true_lse, rtol=0, atol=1e-10)


def test_key_tiles_cover_the_span_once():
    for span in ((0, 0, 1000, 1000), (3, 600, 1300, 2000), (5, 5, 5, 5), (7, 0, 0, 1), (0, 0, 512, 512)):
        keys = [k for lo, hi, _ in module.key_tiles(*span) for k in range(lo, hi)]
        assert keys == list(range(span[0], span[3]))
        assert all(hi - lo <= module.TILE_KEYS for lo, hi, _ in module.key_tiles(*span))
        assert all(not (span[1] <= lo < span[2]) for lo, _, masked in module.key_tiles(*span) if masked)


def most_memory(run) -> float:
    """The most MiB of tensors that are alive at once while it runs, beside those that were before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    events = (event for event in found.profiler.kineto_results.events() if event.name() == "[memory]")
    sizes = sorted((event.start_ns(), event.nbytes()) for event in events)
    return max(accumulate(size for _, size in sizes)) / 2**20


@pytest.mark.parametrize("grad", drawn([False, True], [True]))
def test_long_sequences_need_no_matrix(grad):
    """S = 8,192: the fp32 matrix of one head is 256 MiB, a bool mask of it 64 MiB; 40 MiB must do."""
    q, k, v = (torch.randn(1, 8192, 1, 16, requires_grad=grad) for _ in range(3))
    mask = Causal() & Document(torch.arange(8192) // 2048) if grad else Causal()

    def run():
        out = attention(q, k, v, mask=mask, score=None if grad else SoftCap(30.0))
        if grad:
            out.square().sum().backward()
            assert q.grad is not None and torch.isfinite(q.grad).all()

    assert 1 < most_memory(run) < 40
