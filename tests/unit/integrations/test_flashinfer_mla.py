"""FlashInfer's wrapper of latent attention against attention written out in torch."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import warpattn.integrations.flashinfer as flashinfer
from tests.unit.integrations.test_flashinfer import WORKSPACE, offsets
from warpattn.errors import AttentionError
from warpattn.integrations.flash_attn.latent import joined

HEADS, CKV, KPE, PAGE = 4, 32, 16, 4
KEYS = (9, 1, 4, 21)
SCALE = 0.15
SIZES = {"num_heads": HEADS, "head_dim_ckv": CKV, "head_dim_kpe": KPE, "page_size": PAGE, "sm_scale": SCALE}


class Latents:
    """Requests with a cache of latents and rotary parts, its page lists and their table."""

    def __init__(self, queries=(1,) * 4) -> None:
        counts = [-(-n // PAGE) for n in KEYS]
        order = torch.randperm(sum(counts) + 2, dtype=torch.int32)
        self.cache = torch.full((len(order), PAGE, CKV + KPE), math.nan)
        self.keys, self.q = [torch.randn(n, CKV + KPE) for n in KEYS], torch.randn(sum(queries), HEADS, CKV + KPE)
        self.cu_q, self.indptr, self.indices = offsets(queries), offsets(counts), order[: sum(counts)]
        self.table, self.lengths = torch.zeros(4, max(counts), dtype=torch.int32), torch.tensor(KEYS, dtype=torch.int32)
        for b, keys in enumerate(self.keys):
            own = self.indices[self.indptr[b] : self.indptr[b + 1]]
            self.table[b, : len(own)] = own
            for row, key in enumerate(keys):
                self.cache[own[row // PAGE], row % PAGE] = key
        self.lists = (self.cu_q, self.indptr, self.indices, self.lengths)
        self.parts = (*self.q.split([CKV, KPE], -1), *self.cache.split([CKV, KPE], -1))

    def check(self, out, lse=None, causal=True, sinks=None, natural=False):
        for b, (begin, end) in enumerate(itertools.pairwise(self.cu_q.tolist())):
            k, q = self.keys[b].double(), self.q[begin:end].double()
            s = torch.einsum("qhd,kd->hqk", q, k) * SCALE
            later = torch.arange(len(k)) > torch.arange(len(q))[:, None] + len(k) - len(q)
            s = s.masked_fill(later & causal, -math.inf)
            logits = s if sinks is None else torch.cat((s, sinks.double()[:, None, None].expand(-1, len(q), 1)), -1)
            total = logits.logsumexp(-1)
            expected = torch.einsum("hqk,kd->qhd", torch.exp(s - total[..., None]), k[:, :CKV])
            torch.testing.assert_close(out[begin:end].double(), expected, atol=1e-5, rtol=1e-5)
            if lse is not None:
                wanted = total.T / (1 if natural else math.log(2))
                torch.testing.assert_close(lse[begin:end].double(), wanted, atol=1e-5, rtol=1e-5)


def planned(batch, **options):
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE)
    wrapper.plan(*batch.lists, **{"causal": True, **SIZES, **options})
    return wrapper


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("queries", [(1,) * 4, (1, 1, 1, 3)], ids=["decode", "ragged"])
def test_lists(queries, causal):
    batch, out = Latents(queries), torch.empty(sum(queries), HEADS, CKV)
    wrapper = planned(batch, causal=causal)
    batch.check(*wrapper.run(*batch.parts, return_lse=True), causal=causal)
    batch.check(*wrapper.run_return_lse(*batch.parts, return_lse_base_on_e=True), causal=causal, natural=True)
    sinks, lse = torch.randn(HEADS), torch.empty(sum(queries), HEADS)
    found = wrapper.run(*batch.parts, out, lse, True, sinks=sinks)
    assert found[0] is out and found[1] is lse
    batch.check(out, lse, causal=causal, sinks=sinks)


@pytest.mark.parametrize("queries", [(1,) * 4, (1, 1, 1, 3)], ids=["decode", "ragged"])
def test_the_lengths_alone_say_which_listed_pages_count(queries):
    """Engines list pages ahead of the keys; what they hold there is not read."""
    batch, lists, counts = Latents(queries), [], []
    for b, pages in enumerate(batch.indices.split(batch.indptr.diff().tolist())):
        lists += [*pages.tolist(), *[10**6] * b]
        counts.append(len(pages) + b)
    indices = torch.tensor(lists, dtype=torch.int32)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE)
    wrapper.plan(batch.cu_q, offsets(counts), indices, batch.lengths, causal=True, **SIZES)
    batch.check(*wrapper.run(*batch.parts, return_lse=True))
    empty = torch.zeros_like(batch.lengths)
    wrapper.plan(batch.cu_q, offsets(counts), indices, empty, causal=True, **SIZES)
    assert torch.equal(wrapper.run(*batch.parts), torch.zeros(sum(queries), HEADS, CKV))


def test_as_many_queries_of_each_request():
    batch = Latents((2, 2, 2, 2))
    batch.keys[1] = batch.keys[1][:0]
    batch.lengths[1] = 0
    wrapper = planned(batch)
    out, lse = wrapper.run_return_lse(*batch.parts)
    assert not out[2:4].any() and (lse[2:4] == -math.inf).all()
    batch.keys[1] = torch.zeros(1, CKV + KPE)  # one key of zeros has no weight that another row could show
    for b in (0, 2, 3):
        one = Latents((2, 2, 2, 2))
        one.keys, one.q = batch.keys, batch.q
        one.cu_q = torch.tensor([0, 0, 0, 0, 0])
        one.cu_q[b + 1 :] = 2
        one.q = batch.q[2 * b : 2 * b + 2]
        one.check(out[2 * b : 2 * b + 2], lse[2 * b : 2 * b + 2])


@pytest.mark.parametrize("queries", [(1,) * 4, (1, 1, 1, 3)], ids=["decode", "ragged"])
def test_metadata(queries):
    """A table, lists and both; tensors of 48 columns, pairs and parts by name; a table is read where it is."""
    batch = Latents(queries)
    made = flashinfer.MLAPlanMetadata
    table = (batch.cu_q, batch.table, batch.lengths)
    both = dict(zip(("cum_seq_lens_q", "block_tables", "seq_lens"), table, strict=True))
    nope, pe, ckv, kpe = batch.parts
    for metadata in (made.csr(*batch.lists), made.dense(*table, 3), made.dual(*batch.lists, **both)):
        wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE)
        wrapper.plan(metadata=metadata, causal=True, **SIZES)
        for q, cache in itertools.product((batch.q, (nope, pe)), (batch.cache, (ckv, kpe))):
            batch.check(*wrapper.run(query=q, kv_cache=cache, return_lse=True))
    assert wrapper.tables.table is batch.table and wrapper.tables.lengths is batch.lengths
    wrapper.plan(**both, causal=True, **SIZES)
    batch.check(wrapper.run(*batch.parts))


def test_parts_of_one_buffer_are_read_where_they_are():
    batch = Latents()
    *_, ckv, kpe = batch.parts
    assert joined(ckv, kpe).data_ptr() == batch.cache.data_ptr()
    apart = (ckv.clone(), kpe.clone())
    assert joined(*apart).data_ptr() not in (apart[0].data_ptr(), batch.cache.data_ptr())
    batch.check(planned(batch).run(*(x.clone() for x in batch.parts)))


@pytest.mark.parametrize("per", ["number", "token"])
def test_latents_of_8_bits(per):
    batch = Latents()
    nope, pe, ckv, kpe = batch.parts
    stored = ckv.nan_to_num().to(torch.float8_e4m3fn)
    scale = 0.5 if per == "number" else torch.rand(stored.shape[:2]) + 0.5
    wide = stored.float() * (scale if per == "number" else scale[..., None])
    named = {"ckv_scale" if per == "number" else "ckv_scale_arr": scale}
    for b, n in enumerate(KEYS):
        rows = batch.table[b].long()
        batch.keys[b] = torch.cat([wide[rows], kpe[rows]], -1).flatten(0, 1)[:n]
    batch.check(*planned(batch).run(nope, pe, stored, kpe, return_lse=True, **named))


@pytest.mark.parametrize("queries", [(1,) * 4, (1, 1, 1, 3)], ids=["decode", "ragged"])
def test_plans_of_a_graph_stay_in_their_memory(queries):
    buffers = [torch.empty(n, dtype=torch.int32) for n in (5, 5, 30, 4)]
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE, True, *buffers)
    assert wrapper.is_cuda_graph_enabled
    places = set()
    for _ in range(2):
        batch = Latents(queries)
        wrapper.plan(*batch.lists, causal=True, **SIZES)
        places.add(tuple(x.data_ptr() for x in (wrapper.tables.table, wrapper.tables.lengths, wrapper.cu_q)))
        batch.check(*wrapper.run_return_lse(*batch.parts))
    assert len(places) == 1


def run(plan=None, **options):
    batch = Latents()
    return planned(batch, **(plan or {})).run(**options)


def parts(**changed):
    names = ("q_nope", "q_pe", "ckv_cache", "kpe_cache")
    return dict(zip(names, Latents().parts, strict=True)) | changed


def eight_bit(**scales):
    """A call over latents of 8 bits."""
    given = parts()
    return run(**given | {"ckv_cache": given["ckv_cache"].nan_to_num().to(E4M3)}, **scales)


E4M3 = torch.float8_e4m3fn
BAD = {
    "metadata is 3; it must be a MLAPlanMetadata from this module": lambda: planned_with(None, metadata=3),
    "without qo_indptr, which it replaces": lambda: planned_with(metadata=flashinfer.MLAPlanMetadata()),
    "block_tables lists 2 requests; seq_lens has 4": lambda: planned_with(
        None, metadata=flashinfer.MLAPlanMetadata.dense(offsets((1, 1)), torch.zeros(2, 1).int(), Latents().lengths)
    ),
    "kv_len_arr[1] is 5; request 1 has 1 page of 4 rows in kv_indptr": lambda: planned_with(
        kv_len_arr=torch.tensor([9, 5, 4, 21])
    ),
    "kv_len_arr[2] is -1; request 2 has 1 page": lambda: planned_with(kv_len_arr=torch.tensor([9, 1, -1, 21])),
    "run is called before plan": lambda: flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE).run(**parts()),
    "q_pe has shape (4, 4, 15); it must be a tensor of rank 3 with 16": lambda: run(**parts(q_pe=torch.ones(4, 4, 15))),
    "output_dtype is 'low'; it must be a dtype of torch": lambda: run(plan={"output_dtype": "low"}, **parts()),
    "query is given beside q_nope or q_pe": lambda: run(**parts(query=torch.ones(4, HEADS, 48))),
    "kv_cache is a torch.float32 tensor": lambda: run(query=torch.ones(4, HEADS, 48), kv_cache=torch.ones(3, 4, 47)),
    "ckv_scale_arr is 2.0; it must be a tensor (": lambda: eight_bit(ckv_scale_arr=2.0),
    "ckv_scale_arr is a torch.float32 tensor": lambda: eight_bit(ckv_scale_arr=torch.ones(3)),
    "ckv_scale is 'a'; it must be a number": lambda: eight_bit(ckv_scale="a"),
    "causal is 'yes'; it must be True or False": lambda: planned(Latents(), causal="yes"),
    "qo_indptr has shape ()": lambda: flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE, True, torch.ones(()).int()),
    "ckv_cache has dtype torch.float8_e4m3fn and kpe_cache torch.float8_e4m3fn": lambda: run(
        query=torch.ones(4, HEADS, 48), kv_cache=torch.ones(20, PAGE, 48).to(E4M3)
    ),
    "kpe_scale is 2.0; rotary parts have 16 bits": lambda: run(**parts(kpe_scale=2.0)),
}


def planned_with(lists=(), **changed):
    names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
    given = {} if lists is None else dict(zip(names, Latents().lists, strict=True))
    flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE).plan(**(SIZES | given | changed))


@pytest.mark.parametrize("sentence", BAD)
def test_what_is_refused_is_one_sentence(sentence):
    with pytest.raises(AttentionError) as found:
        BAD[sentence]()
    (reason,) = found.value.reasons
    assert sentence in reason


PAIR = {"query": torch.ones(3, HEADS, 48), "kv_cache": torch.ones(2, 3, 48), "ckv_scale": 0.5}
LISTED = {
    "kv_indices is torch.float32 of rank 1.*kv_len_arr is None; it must be a.*sm_scale is None; latent": lambda: (
        planned_with(kv_len_arr=None, kv_indices=torch.ones(12), sm_scale=None)
    ),
    "kv_len_arr.*kv_indptr begins with 1; it must begin with 0.*kv_indptr lists 13 pages; kv_indices has 11": lambda: (
        planned_with(kv_indptr=torch.tensor([1, 3, 4, 5, 13]))
    ),
    "q_nope is.*q_pe is.*ckv_cache is.*kpe_cache is.*return_lse_base_on_e is False; .* lse_mode 'basee'": lambda: (
        run(plan={"lse_mode": "basee"}, return_lse=True)
    ),
    "ckv_scale is 0.5; it belongs.*cache has 2 pages of 3 rows; .*pages of 4.*num_heads of the plan is 3; .* have "
    "4.*queries have 3 tokens; .* for 4 requests of 1.*output_dtype is torch.float16": lambda: (
        run(plan={"num_heads": 3, "output_dtype": torch.half}, **PAIR)
    ),
}


@pytest.mark.parametrize("listed", LISTED)
def test_every_broken_rule_is_listed(listed):
    with pytest.raises(AttentionError, match=f"(?s){listed}"):
        LISTED[listed]()


def test_graphs_decode_up_to_16_new_tokens_of_a_request():
    """A captured graph leaves out what its kernel was not made for, so a later plan may not bring more."""
    few, many = Latents((3, 1, 1, 2)), Latents((3, 1, 1, 17))
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE, True)
    table = {"block_tables": few.table, "seq_lens": few.lengths, "causal": True, **SIZES}
    wrapper.plan(cum_seq_lens_q=few.cu_q, **table)
    assert wrapper.max_q == 16
    few.check(wrapper.run(*few.parts))
    with pytest.raises(AttentionError, match="a request has 17 new tokens; graphs of this wrapper were planned for"):
        wrapper.plan(cum_seq_lens_q=many.cu_q, **table)
    other = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE, True)
    other.plan(cum_seq_lens_q=many.cu_q, **table)
    assert other.max_q is None
