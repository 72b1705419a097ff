"""FlashInfer's calls against attention written out in torch: pages as it lists them, layouts, windows, base-2 LSEs."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import warpattn.integrations.flashinfer as flashinfer
from warpattn.errors import AttentionError
from warpattn.integrations.flashinfer.tables import PageLists, Tables

HEADS, HEADS_KV, DIM, PAGE = 4, 2, 16, 4
WORKSPACE = torch.empty(0, dtype=torch.uint8)
KEYS = (9, 0, 4, 21)
QUERIES = (3, 0, 4, 1)


def offsets(counts) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)


def written_out(q, k, v, causal=False, window=-1, cap=0.0, scale=None, sinks=None):
    """out and base-2 LSE (rows, heads) of one request; its queries sit at the last keys."""
    k, v = (x.repeat_interleave(HEADS // HEADS_KV, 1).double() for x in (k, v))
    s = torch.einsum("qhd,khd->hqk", q.double(), k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = cap * torch.tanh(s / cap) if cap else s
    ages = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
    hidden = (ages < 0) & causal | ((ages > window) & (window >= 0))
    s = s.masked_fill(hidden, -math.inf)
    logits = s if sinks is None else torch.cat((s, sinks.double()[:, None, None].expand(-1, len(q), 1)), -1)
    lse = logits.logsumexp(-1)
    p = torch.exp(s - lse[..., None]).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", p, v).float(), (lse.T / math.log(2)).float()


class Batch:
    """Requests with keys in pages, as lists and one after the other."""

    def __init__(self, layout="NHD", tensor=True, queries=QUERIES) -> None:
        counts = [-(-n // PAGE) for n in KEYS]
        order = torch.randperm(sum(counts) + 3, dtype=torch.int32)
        self.keys = [[torch.randn(n, HEADS_KV, DIM) for n in KEYS] for _ in range(2)]
        self.q = [torch.randn(n, HEADS, DIM) for n in queries]
        cache = torch.full((len(order), 2, PAGE, HEADS_KV, DIM), math.nan)
        self.indptr, self.indices = offsets(counts), order[: sum(counts)]
        for side, b in itertools.product(range(2), range(len(KEYS))):
            rows = torch.full((counts[b] * PAGE, HEADS_KV, DIM), math.nan)
            rows[: KEYS[b]] = self.keys[side][b]
            own = self.indices[self.indptr[b] : self.indptr[b + 1]].long()
            cache[own, side] = rows.view(-1, PAGE, HEADS_KV, DIM)
        cache = cache if layout == "NHD" else cache.transpose(2, 3).contiguous()
        self.cache = cache if tensor else (cache[:, 0].clone(), cache[:, 1].clone())
        self.last = torch.tensor([(n - 1) % PAGE + 1 for n in KEYS], dtype=torch.int32)
        self.pages = (self.indptr, self.indices, self.last)

    def check(self, out, lse, **options):
        found = zip(out.split([len(q) for q in self.q]), lse.split([len(q) for q in self.q]), strict=True)
        for q, k, v, (part, part_lse) in zip(self.q, *self.keys, found, strict=True):
            expected = written_out(q, k, v, **options)
            torch.testing.assert_close(part, expected[0])
            torch.testing.assert_close(part_lse, expected[1])


OPTIONS = {
    "plain": ({}, {}),
    "window": ({"window_left": 3}, {"window": 3}),
    "soft-cap": ({"logits_soft_cap": 1.5}, {"cap": 1.5}),
    "scale": ({"sm_scale": 0.7}, {"scale": 0.7}),
    "window-0": ({"window_left": 0, "logits_soft_cap": 0.0}, {"window": 0}),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("layout", "tensor"), [("NHD", True), ("HND", False)])
def test_decode(layout, tensor, name):
    given, expected = OPTIONS[name]
    batch = Batch(layout, tensor, queries=(1,) * 4)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, layout)
    wrapper.plan(*batch.pages, HEADS, HEADS_KV, DIM, PAGE, **given, q_data_type=torch.float32)
    batch.check(*wrapper.run(torch.cat(batch.q), batch.cache, return_lse=True), **expected)


def test_decode_of_several_tokens_with_sinks_and_factors():
    batch, sinks = Batch(queries=(2,) * 4), torch.randn(HEADS)
    batch.keys = [[x if len(x) else x.new_zeros(0, HEADS_KV, DIM) for x in side] for side in batch.keys]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(*batch.pages, HEADS, HEADS_KV, DIM, PAGE, "NONE", -1, 0.0, q_len_per_req=2)
    q, out, lse = torch.cat(batch.q), torch.empty(8, HEADS, DIM), torch.empty(8, HEADS)
    found = wrapper.run(q, batch.cache, out=out, lse=lse, return_lse=True, sinks=sinks, q_scale=2.0, k_scale=0.5)
    assert found[0] is out and found[1] is lse
    batch.check(out, lse, causal=True, sinks=sinks)
    shorter = wrapper.run(q, batch.cache, v_scale=1.0, return_lse=True, window_left=2)
    batch.check(*shorter, causal=True, window=2)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", OPTIONS)
def test_prefill_over_pages(name, causal):
    given, expected = OPTIONS[name]
    batch = Batch()
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(offsets(QUERIES), *batch.pages, HEADS, HEADS_KV, DIM, PAGE, causal=causal, **given)
    batch.check(*wrapper.run(torch.cat(batch.q), batch.cache, return_lse=True), causal=causal, **expected)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", OPTIONS)
def test_prefill_of_ragged_keys(name, causal):
    given, expected = OPTIONS[name]
    batch = Batch()
    k, v = (torch.cat(side) for side in batch.keys)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    wrapper.plan(offsets(QUERIES), offsets(KEYS), HEADS, HEADS_KV, DIM, causal=causal, **given)
    out, lse = wrapper.run(torch.cat(batch.q), k, v, return_lse=True)
    batch.check(out, lse, causal=causal, **expected)
    _, natural = wrapper.run(torch.cat(batch.q), k, v, return_lse=True, lse_base="ln", lse_layout="HN")
    torch.testing.assert_close(natural.T / math.log(2), lse)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("name", OPTIONS)
def test_single_requests(name, layout):
    given, expected = OPTIONS[name]
    q, (k, v) = torch.randn(5, HEADS, DIM), torch.randn(2, 9, HEADS_KV, DIM)
    laid = [x if layout == "NHD" else x.transpose(0, 1).contiguous() for x in (k, v)]
    options = {"kv_layout": layout, "return_lse": True, **given}
    for causal in (True, False):
        found = flashinfer.single_prefill_with_kv_cache(q, *laid, causal=causal, **options)
        for x, y in zip(found, written_out(q, k, v, causal, **expected), strict=True):
            torch.testing.assert_close(x, y)
    found = flashinfer.single_decode_with_kv_cache(q[-1], *laid, **options)
    for x, y in zip(found, written_out(q[-1:], k, v, **expected), strict=True):
        torch.testing.assert_close(x, y[0])


def test_a_mask_of_ones_own_stands_for_causal():
    q, (k, v) = torch.randn(5, HEADS, DIM), torch.randn(2, 9, HEADS_KV, DIM)
    mask = torch.arange(9) < torch.arange(3, 8)[:, None]
    found = flashinfer.single_prefill_with_kv_cache(q, k, v, custom_mask=mask, causal=True)
    expected = torch.cat([written_out(q[i : i + 1], k[: 3 + i], v[: 3 + i])[0] for i in range(5)])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("paged", [True, False])
def test_masks_of_ones_own_in_a_batch(paged, window):
    """Every request has its own; a plan without one has none, and a call's window holds beside it."""
    batch = Batch()
    seen = [torch.rand(q, k) < 0.6 for q, k in zip(QUERIES, KEYS, strict=True)]
    flat = torch.cat([x.view(-1) for x in seen])
    options = {} if window is None else {"window_left": window}
    k, v = (torch.cat(side) for side in batch.keys)

    def found(mask):
        if paged:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
            wrapper.plan(offsets(QUERIES), *batch.pages, HEADS, HEADS_KV, DIM, PAGE, causal=True, custom_mask=mask)
            return wrapper.run(torch.cat(batch.q), batch.cache, return_lse=True, **options)
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
        wrapper.plan(offsets(QUERIES), offsets(KEYS), HEADS, HEADS_KV, DIM, causal=True, custom_mask=mask, **options)
        return wrapper.run(torch.cat(batch.q), k, v, return_lse=True)

    counts, (out, lse) = list(QUERIES), found(flat)
    rows = zip(batch.q, *batch.keys, seen, out.split(counts), lse.split(counts), strict=True)
    for q, keys, values, own, part, part_lse in rows:
        for i in range(len(q)):
            age = i + len(keys) - len(q) - torch.arange(len(keys))
            shown = own[i] & ((age <= window) if window is not None else torch.tensor(True))
            expected = written_out(q[i : i + 1], keys[shown], values[shown])
            torch.testing.assert_close(part[i : i + 1], expected[0])
            torch.testing.assert_close(part_lse[i : i + 1], expected[1])
    if window is None:
        batch.check(*found(None), causal=True)


def test_plans_of_a_graph_stay_in_their_memory():
    batch = Batch(queries=(1,) * 4)
    buffers = (torch.empty(5, dtype=torch.int32), torch.empty(30, dtype=torch.int32), torch.empty(4, dtype=torch.int32))
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *buffers)
    assert wrapper.is_cuda_graph_enabled
    places = set()
    for other in (batch, Batch(queries=(1,) * 4)):
        wrapper.plan(*other.pages, HEADS, HEADS_KV, DIM, PAGE)
        places.add((wrapper.tables.table.data_ptr(), wrapper.tables.lengths.data_ptr()))
        other.check(*wrapper.run(torch.cat(other.q), other.cache, return_lse=True))
    assert len(places) == 1
    with pytest.raises(AttentionError, match="the batch has 3 requests"):
        wrapper.plan(batch.indptr[:4], batch.indices, batch.last[:3], HEADS, HEADS_KV, DIM, PAGE)


def test_merging():
    q, (k, v) = torch.randn(5, HEADS, DIM), torch.randn(2, 9, HEADS_KV, DIM)
    cuts = (0, 2, 7, 9)
    states = [written_out(q, k[a:b], v[a:b]) for a, b in itertools.pairwise(cuts)]
    whole = written_out(q, k, v)
    merged = flashinfer.merge_states(*(torch.stack(x, 1) for x in zip(*states, strict=True)))
    first = flashinfer.merge_state(*states[0], *states[1])
    rows = torch.tensor([True, False, True, True, True])
    flashinfer.merge_state_in_place(*first, *states[2], mask=rows)
    for x, y, z in zip(merged, whole, first, strict=True):
        torch.testing.assert_close(x, y)
        torch.testing.assert_close(z[rows], y[rows])
        assert not torch.allclose(z[1], y[1])


@pytest.mark.parametrize("extreme", [torch.finfo(torch.float32).min, torch.finfo(torch.float32).max])
def test_extreme_states_stay_finite(extreme):
    """Near the ends of fp32 a natural log has no number in base 2; -inf would say that no key was seen."""
    v, s = torch.randn(5, 3, HEADS, DIM), torch.full((5, 3, HEADS), extreme)
    for _ in range(3):
        out, whole = flashinfer.merge_states(v, s)
        torch.testing.assert_close(out, v.mean(1))
        torch.testing.assert_close(whole, s[:, 0])
        s = whole[:, None].expand_as(s)
    q = torch.full((HEADS, DIM), 1e19)
    k = q[:HEADS_KV].expand(7, HEADS_KV, DIM) * (0.1 if extreme > 0 else -0.1)
    values = torch.randn(7, HEADS_KV, DIM)
    out, lse = flashinfer.single_prefill_with_kv_cache(q[None], k, values, sm_scale=30 / DIM, return_lse=True)
    torch.testing.assert_close(out, values.mean(0).repeat_interleave(HEADS // HEADS_KV, dim=0)[None])
    assert (lse == extreme).all()


@pytest.mark.parametrize("k_scale", [0.5, torch.tensor([0.5]), torch.tensor([0.5, 2.0])], ids=str)
def test_keys_and_values_of_8_bits(k_scale):
    """In pages, end to end and of one request; q_scale goes into the scores, the others belong to keys and values."""
    batch, v_scale = Batch(tensor=False), torch.tensor([3.0, 0.25])
    e4m3, scales = torch.float8_e4m3fn, {"q_scale": 2.0, "k_scale": k_scale, "v_scale": v_scale}
    stored = [[x.to(e4m3) for x in side] for side in batch.keys]
    meant = [torch.as_tensor(k_scale).expand(HEADS_KV)[:, None], v_scale[:, None]]
    batch.keys = [[x.float() * scale for x in side] for side, scale in zip(stored, meant, strict=True)]
    q, cache = torch.cat(batch.q), tuple(x.to(e4m3) for x in batch.cache)
    expected = {"causal": True, "scale": 2.0 * DIM**-0.5}
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    paged.plan(offsets(QUERIES), *batch.pages, HEADS, HEADS_KV, DIM, PAGE, causal=True)
    batch.check(*paged.run(q, cache, return_lse=True, **scales), **expected)
    flat = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    flat.plan(offsets(QUERIES), offsets(KEYS), HEADS, HEADS_KV, DIM, causal=True)
    batch.check(*flat.run(q, *(torch.cat(side) for side in stored), return_lse=True, **scales), **expected)
    out = flashinfer.single_decode_with_kv_cache(batch.q[3][0], stored[0][3], stored[1][3], **scales)
    torch.testing.assert_close(out, written_out(batch.q[3], batch.keys[0][3], batch.keys[1][3], **expected)[0][0])
    with pytest.raises(AttentionError, match=r"^k_scale has shape \(3,\)"):
        paged.run(q, cache, k_scale=torch.ones(3))


@pytest.mark.parametrize("q_scale", [2.0, torch.linspace(0.5, 1.5, HEADS)], ids=["number", "heads"])
def test_queries_of_8_bits(q_scale):
    """By every wrapper and of one request, as over what is meant; the result is in bf16."""
    batch, e4m3, scales = Batch(tensor=False), torch.float8_e4m3fn, {"q_scale": q_scale, "k_scale": 0.5, "v_scale": 2.0}
    stored, q = [[x.to(e4m3) for x in side] for side in batch.keys], torch.cat(batch.q).to(e4m3)
    meant = q.float() * (q_scale if isinstance(q_scale, float) else q_scale[:, None])
    cache = tuple(x.to(e4m3) for x in batch.cache)
    wide = (cache[0].float() * 0.5, cache[1].float() * 2.0)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(offsets(QUERIES), *batch.pages, HEADS, HEADS_KV, DIM, PAGE, causal=True, o_data_type="bfloat16")
    found = wrapper.run(q, cache, **scales)
    wrapper.plan(offsets(QUERIES), *batch.pages, HEADS, HEADS_KV, DIM, PAGE, causal=True)
    assert torch.equal(found, wrapper.run(meant, wide).bfloat16())
    flat = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    flat.plan(offsets(QUERIES), offsets(KEYS), HEADS, HEADS_KV, DIM, causal=True)
    assert torch.equal(flat.run(q, *(torch.cat(side) for side in stored), **scales), found)
    single = {"scale_q": q_scale, "scale_k": 0.5, "scale_v": torch.full((HEADS_KV,), 2.0), "causal": True}
    one = flashinfer.single_prefill_with_kv_cache(q[-QUERIES[3] :], stored[0][3], stored[1][3], **single)
    assert torch.equal(one, found[-QUERIES[3] :])
    with pytest.raises(AttentionError, match=r"^scale_q is .*; it belongs to q of 8 bits, without"):
        flashinfer.single_prefill_with_kv_cache(meant, *(side[3].float() for side in stored), scale_q=q_scale)


def decode_plan(**options):
    batch = Batch(queries=(1,) * 4)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, options.pop("kv_layout", "NHD"))
    wrapper.plan(*batch.pages, HEADS, HEADS_KV, DIM, PAGE, **options)
    return wrapper, torch.cat(batch.q), batch.cache


def ragged_plan(**options):
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    return wrapper.plan(offsets(QUERIES), offsets(KEYS), HEADS, HEADS_KV, DIM, **options)


def decode_run(plan=None, **options):
    wrapper, q, cache = decode_plan(**(plan or {}))
    return wrapper.run(q, cache, **options)


BAD = {
    "kv_layout is 'DHN'": lambda: decode_plan(kv_layout="DHN"),
    "window_right is 1": lambda: decode_plan(window_right=1),
    "custom_mask has 3 elements": lambda: ragged_plan(custom_mask=torch.ones(3).bool()),
    "packed_custom_mask has 3 elements": lambda: ragged_plan(packed_custom_mask=torch.ones(3).byte()),
    "packed_custom_mask has dtype torch.int32": lambda: ragged_plan(packed_custom_mask=torch.ones(3).int()),
    "v_scale is a torch.float32 tensor": lambda: decode_run(v_scale=torch.ones(HEADS_KV)),
    "q_len_per_req is 3; it must divide": lambda: decode_run(q_len_per_req=3),
    "v has dtype torch.float8_e4m3fn": lambda: flashinfer.single_decode_with_kv_cache(
        torch.ones(HEADS, DIM), torch.ones(5, HEADS_KV, DIM), torch.ones(5, HEADS_KV, DIM).to(torch.float8_e4m3fn),
        v_scale=2.0,
    ),
    "kv_cache_sf is": lambda: decode_run(kv_cache_sf=torch.ones(1)),
    "o_data_type is torch.float16": lambda: decode_run(plan={"o_data_type": "float16"}),
    "use_cuda_graph is True": lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "NHD", True),
    "run is called before plan": lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE).run(
        torch.ones(1, HEADS, DIM), torch.ones(1, 2, PAGE, HEADS_KV, DIM)
    ),
    "paged_kv_cache is": lambda: decode_plan()[0].run(torch.ones(4, HEADS, DIM), torch.ones(1, 3, PAGE, HEADS_KV, DIM)),
}


@pytest.mark.parametrize("sentence", BAD)
def test_what_is_refused_is_one_sentence(sentence):
    with pytest.raises(AttentionError) as found:
        BAD[sentence]()
    (reason,) = found.value.reasons
    assert sentence in reason


LISTS = {  # indptr, indices, last_page_len
    "indptr begins with 1; it must begin with 0": ((1, 2), (0, 1), (4,)),
    f"indices holds -1; its elements must be within 0 .. {2**30}": ((0, 3), (0, -1, -2), (4,)),
    f"last_page_len holds -1; its elements must be within 0 .. {PAGE}": ((0, 1, 2), (0, 1), (-1, -2)),
    f"last_page_len holds {PAGE + 1}; its elements must be within 0 .. {PAGE}": ((0, 1), (0,), (PAGE + 1,)),
    "indptr lists 1 request and 3 pages; last_page_len has 1 and indices 2": ((0, 3), (0, 1), (4,)),
    "indptr lists 2 requests and 1 page; last_page_len has 2 and indices 2": ((0, 2, 1), (0, 1), (4, 4)),
    "indptr lists 2 requests and 2 pages; last_page_len has 1 and indices 2": ((0, 1, 2), (0, 1), (4,)),
    "indptr is empty; it begins with 0": ((), (), ()),
}


@pytest.mark.parametrize("sentence", LISTS)
def test_lists_that_are_no_pages(sentence):
    """The first wrong element is named; elements of requests without pages are not read."""
    lists = PageLists(*(torch.tensor(x, dtype=torch.int32) for x in LISTS[sentence]), PAGE)
    with pytest.raises(AttentionError) as found:
        Tables().plan(lists, torch.device("cpu"))
    assert found.value.reasons == (sentence,)


def test_pages_have_rows():
    empty = torch.tensor((), dtype=torch.int32)
    with pytest.raises(AttentionError, match="page_size is 0; it must be an int from 1 on"):
        Tables().plan(PageLists(torch.tensor([0]), empty, empty, 0), torch.device("cpu"))


def test_lists_at_their_limits():
    """No requests; requests without pages; as many pages as a graph was made for, and one more."""
    tables, empty = Tables(), torch.tensor((), dtype=torch.int32)
    tables.plan(PageLists(torch.tensor([0]), empty, empty, PAGE), torch.device("cpu"))
    assert tables.table.shape == (0, 1) and tables.sizes == (PAGE, 0)
    tables.plan(PageLists(torch.tensor([0, 0]), empty, torch.tensor([99]), PAGE), torch.device("cpu"))
    assert tables.table.shape == (1, 1) and tables.lengths.tolist() == [0]
    fixed, lists = Tables((1, 2)), PageLists(torch.tensor([0, 2]), torch.tensor([5, 3, 9]), torch.tensor([1]), PAGE)
    fixed.plan(lists, torch.device("cpu"))
    assert fixed.table.tolist() == [[5, 3]] and fixed.lengths.tolist() == [PAGE + 1]
    fixed.check("cache", torch.empty(6, PAGE, HEADS_KV, DIM))
    for pages, rows in ((5, PAGE), (6, PAGE - 1), (6, PAGE + 1)):
        with pytest.raises(AttentionError, match=f"cache has {pages} pages of {rows} rows; the plan was made for"):
            fixed.check("cache", torch.empty(pages, rows, HEADS_KV, DIM))
    with pytest.raises(AttentionError, match="1 request with up to 3 pages; the wrapper was made for"):
        fixed.plan(lists._replace(indptr=torch.tensor([0, 3])), torch.device("cpu"))


def test_tensors_that_hold_no_lse():
    q, k, v = torch.randn(2, HEADS, DIM), *torch.randn(2, 3, HEADS_KV, DIM)
    call = {"return_lse": True, "out": torch.empty_like(q)}
    for lse, words in (
        (call["out"][..., 0], "lse shares memory with out"),
        (q[..., 0], "lse shares memory with q"),
        (torch.empty(2, 1).expand(2, HEADS), "each of its elements must have its own place"),
        (torch.empty(2, HEADS, requires_grad=True), "lse requires a gradient"),
    ):
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
        wrapper.plan(offsets([2]), offsets([3]), HEADS, HEADS_KV, DIM)
        with pytest.raises(AttentionError, match=words):
            wrapper.run(q, k, v, lse=lse, **call)
    with pytest.raises(AttentionError, match=r"^v has shape .* must have its own place in memory$"):
        flashinfer.merge_state_in_place(q[:1].expand(2, HEADS, DIM), torch.zeros(2, HEADS), q, torch.zeros(2, HEADS))


def test_a_wrapper_of_inference_mode_plans_outside_of_it():
    batch = Batch(queries=(1,) * 4)
    indptr, indices, last = batch.pages
    with torch.inference_mode():
        buffers = [torch.zeros_like(x) for x in (indptr, indices, last)]
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "NHD", True, False, *buffers)
        wrapper.plan(*batch.pages, HEADS, HEADS_KV, DIM, PAGE)
        lse = torch.empty(4, HEADS)
    wrapper.plan(*batch.pages, HEADS, HEADS_KV, DIM, PAGE)
    batch.check(*wrapper.run(torch.cat(batch.q), batch.cache, lse=lse, return_lse=True))
