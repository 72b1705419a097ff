"""FlashInfer's older `forward`, levels of shared keys, masks as bits: against attention written out in torch."""

from __future__ import annotations

import itertools

import pytest
import torch

import warpattn.integrations.flashinfer as flashinfer
from tests.unit.integrations.test_flashinfer import (
    DIM,
    HEADS,
    HEADS_KV,
    KEYS,
    OPTIONS,
    PAGE,
    QUERIES,
    WORKSPACE,
    Batch,
    offsets,
    written_out,
)
from warpattn.errors import AttentionError

SIZES = (HEADS, HEADS_KV, DIM)


def decode(batch):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    return wrapper, (*batch.pages, *SIZES, PAGE), (torch.cat(batch.q), batch.cache)


def paged(batch):
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    return wrapper, (offsets(QUERIES), *batch.pages, *SIZES, PAGE), (torch.cat(batch.q), batch.cache)


def ragged(batch):
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    k, v = (torch.cat(side) for side in batch.keys)
    return wrapper, (offsets(QUERIES), offsets(KEYS), *SIZES), (torch.cat(batch.q), k, v)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", [decode, paged, ragged])
def test_options_of_forward_replace_those_of_the_plan(kind, name):
    """For later calls of run, too."""
    given, expected = OPTIONS[name]
    batch = Batch(queries=(1,) * 4 if kind is decode else QUERIES)
    wrapper, lists, tensors = kind(batch)
    wrapper.begin_forward(*lists, sm_scale=0.1, window_left=1, logits_soft_cap=0.5)
    for causal in (False,) if kind is decode else (True, False):
        options = given if kind is decode else {"causal": causal, **given}
        expected = {**expected, "causal": causal}
        batch.check(*wrapper.forward_return_lse(*tensors, **options), **expected)
        out, lse = wrapper.run_return_lse(*tensors)
        batch.check(out, lse, **expected)
        assert torch.equal(wrapper.forward(*tensors, **options), out)
    wrapper.end_forward()


def test_forward_has_factors_and_keeps_a_mask_of_ones_own():
    batch = Batch(queries=(1,) * 4)
    wrapper, lists, tensors = decode(batch)
    wrapper.plan(*lists)
    found = wrapper.forward_return_lse(*tensors, q_scale=0.5, k_scale=3.0, sm_scale=0.2)
    batch.check(*found, scale=0.3)
    batch = Batch()
    wrapper, lists, tensors = paged(batch)
    pairs = sum(q * k for q, k in zip(QUERIES, KEYS, strict=True))
    wrapper.plan(*lists, custom_mask=torch.ones(pairs, dtype=torch.bool))
    batch.check(*wrapper.forward_return_lse(*tensors, causal=True))


@pytest.mark.parametrize("kind", [decode, paged])
def test_workspaces_are_empty_and_warming_does_nothing(kind):
    wrapper, lists, tensors = kind(Batch(queries=(1,) * 4 if kind is decode else QUERIES))
    assert wrapper.workspace_size(*lists, window_left=3) == (0, 0)
    wrapper.reset_workspace_buffer(WORKSPACE, int_workspace_buffer=WORKSPACE)
    with pytest.raises(AttentionError, match=r"^prewarm_paged_kv_stride_variant is called before plan"):
        wrapper.prewarm_paged_kv_stride_variant()
    with pytest.raises(AttentionError, match=r"^forward is called before plan"):
        wrapper.forward(*tensors)
    wrapper.plan(*lists)
    wrapper.prewarm_paged_kv_stride_variant()
    with pytest.raises(AttentionError, match=r"^variant is 'shared'; it must be independent"):
        wrapper.prewarm_paged_kv_stride_variant("shared")
    with pytest.raises(AttentionError, match=r"^sm_scale is 'a'; it must be a number"):
        wrapper.forward(*tensors, sm_scale="a")


# A common prompt of 11 keys, read by all requests, before each one's own keys.
COMMON = 11


def shared_prefix(queries):
    """A batch whose pages also have a common prompt: its (k, v), the cache, and the prompt's page lists."""
    batch = Batch(queries=queries)
    k, v = torch.randn(2, COMMON, HEADS_KV, DIM)
    pages = -(-COMMON // PAGE)
    extra = torch.full((pages, 2, PAGE, HEADS_KV, DIM), torch.nan)
    for side, x in enumerate((k, v)):
        rows = torch.full((pages * PAGE, HEADS_KV, DIM), torch.nan)
        rows[:COMMON] = x
        extra[:, side] = rows.view(pages, PAGE, HEADS_KV, DIM)
    indices = torch.arange(len(batch.cache), len(batch.cache) + pages, dtype=torch.int32)
    lists = (offsets((pages,)), indices, torch.tensor([(COMMON - 1) % PAGE + 1], dtype=torch.int32))
    return batch, (k, v), torch.cat([batch.cache, extra]), lists


def with_prompt(batch, prompt):
    """The batch whose requests have the prompt before their own keys."""
    batch.keys = [[torch.cat([x, own]) for own in side] for x, side in zip(prompt, batch.keys, strict=True)]
    return batch


def check_out(batch, out, **options):
    counts = [len(q) for q in batch.q]
    for q, k, v, part in zip(batch.q, *batch.keys, out.split(counts), strict=True):
        torch.testing.assert_close(part, written_out(q, k, v, **options)[0])


LEVELS = {"causal": ({"causal": True}, {"causal": True}), "cap": ({"logits_soft_cap": 1.5, "sm_scale": 0.7}, {})}
LEVELS["cap"][1].update(cap=1.5, scale=0.7)


@pytest.mark.parametrize("name", LEVELS)
def test_levels_of_shared_keys(name):
    given, expected = LEVELS[name]
    batch, prompt, cache, lists = shared_prefix((2, 1, 4, 1))
    cu_q = offsets([len(q) for q in batch.q])
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, WORKSPACE)
    levels = list(zip(lists, batch.pages, strict=True))
    wrapper.plan([cu_q[[0, -1]], cu_q], *map(list, levels), *SIZES, PAGE, **given)
    # request 1 has no keys of its own: it sees the prompt alone
    check_out(with_prompt(batch, prompt), wrapper.run(torch.cat(batch.q), cache), **expected)


def test_one_level_has_a_window_and_several_refuse_it():
    batch = Batch()
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(1, WORKSPACE)
    wrapper.begin_forward([offsets(QUERIES)], *([x] for x in batch.pages), *SIZES, PAGE, causal=True, window_left=3)
    check_out(batch, wrapper.forward(torch.cat(batch.q), batch.cache), causal=True, window=3)
    two = flashinfer.MultiLevelCascadeAttentionWrapper(2, WORKSPACE)
    lists = [[x, x] for x in (offsets(QUERIES), *batch.pages)]
    with pytest.raises(AttentionError, match=r"^window_left is 3; with several levels"):
        two.plan(*lists, *SIZES, PAGE, window_left=3)
    with pytest.raises(AttentionError, match=r"^qo_indptr_arr is a list of 1 element; it must be a list of 2 tensors"):
        two.plan([offsets(QUERIES)], *lists[1:], *SIZES, PAGE)
    with pytest.raises(AttentionError, match=r"^run is called before plan"):
        two.run(torch.cat(batch.q), batch.cache)
    with pytest.raises(AttentionError, match=r"^num_levels is 0"):
        flashinfer.MultiLevelCascadeAttentionWrapper(0, WORKSPACE)


def test_levels_of_a_graph_stay_in_their_memory():
    queries = (1,) * 4
    buffers = {
        "qo_indptr_buf_arr": [torch.empty(2, dtype=torch.int32), torch.empty(5, dtype=torch.int32)],
        "paged_kv_indptr_buf_arr": [torch.empty(2, dtype=torch.int32), torch.empty(5, dtype=torch.int32)],
        "paged_kv_indices_buf_arr": [torch.empty(30, dtype=torch.int32)] * 2,
        "paged_kv_last_page_len_buf_arr": [torch.empty(1, dtype=torch.int32), torch.empty(4, dtype=torch.int32)],
    }
    with pytest.raises(AttentionError, match=r"^qo_indptr_buf_arr is None"):
        flashinfer.MultiLevelCascadeAttentionWrapper(2, WORKSPACE, "NHD", True)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, WORKSPACE, "NHD", True, **buffers)
    assert wrapper.is_cuda_graph_enabled
    places = set()
    for _ in range(2):
        batch, prompt, cache, lists = shared_prefix(queries)
        levels = zip(lists, batch.pages, strict=True)
        wrapper.plan([offsets((4,)), offsets(queries)], *map(list, levels), *SIZES, PAGE)
        places.add(tuple(x.tables.table.data_ptr() for x in wrapper.levels))
        check_out(with_prompt(batch, prompt), wrapper.run(torch.cat(batch.q), cache))
    assert len(places) == 1


@pytest.mark.parametrize("causal", [True, False])
def test_a_shared_prefix_of_dense_keys(causal):
    batch, prompt, cache, _ = shared_prefix((2, 1, 4, 1))
    wrapper = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(WORKSPACE)
    wrapper.begin_forward(offsets((2, 1, 4, 1)), *batch.pages, *SIZES, PAGE)
    q = torch.cat(batch.q)
    out = wrapper.forward(q, *prompt, cache, causal=causal, sm_scale=0.7)
    wrapper.end_forward()
    check_out(with_prompt(batch, prompt), out, causal=causal, scale=0.7)
    batch, prompt, cache, _ = shared_prefix((1,) * 4)
    single = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(WORKSPACE)
    with pytest.raises(AttentionError, match=r"^forward is called before plan"):
        single.forward(torch.cat(batch.q), *prompt, cache)
    single.begin_forward(*batch.pages, *SIZES, PAGE, "float32")
    check_out(with_prompt(batch, prompt), single.forward(torch.cat(batch.q), *prompt, cache))


@pytest.mark.parametrize("order", ["big", "little"])
def test_bits(order):
    """As NumPy packs them, each segment from a byte of its own on."""
    np = pytest.importorskip("numpy")
    x = torch.rand(45) < 0.5
    expected = torch.from_numpy(np.packbits(x.numpy(), bitorder=order))
    assert torch.equal(flashinfer.packbits(x, order), expected)
    cuts = torch.tensor([0, 4, 4, 20, 45], dtype=torch.int32)
    packed, starts = flashinfer.segment_packbits(x, cuts, order)
    assert starts.tolist() == [0, 1, 1, 3, 7] and starts.dtype == torch.int32
    for (a, b), (i, j) in zip(itertools.pairwise(cuts.tolist()), itertools.pairwise(starts.tolist()), strict=True):
        assert torch.equal(packed[i:j], flashinfer.packbits(x[a:b], order))


def test_masks_as_bits_are_those_of_bools():
    batch, seen = Batch(), [torch.rand(q, k) < 0.6 for q, k in zip(QUERIES, KEYS, strict=True)]
    flat = torch.cat([x.flatten() for x in seen])
    ends = torch.tensor([0, *itertools.accumulate(x.numel() for x in seen)])
    bits, _ = flashinfer.segment_packbits(flat, ends, "little")
    for kind in (paged, ragged):
        wrapper, lists, tensors = kind(batch)
        wrapper.plan(*lists, custom_mask=flat)
        expected = wrapper.run_return_lse(*tensors)
        wrapper.plan(*lists, packed_custom_mask=bits, causal=True)
        for x, y in zip(wrapper.run_return_lse(*tensors), expected, strict=True):
            assert torch.equal(x, y)
    one = (batch.q[0], batch.keys[0][0], batch.keys[1][0])
    found = flashinfer.single_prefill_with_kv_cache_return_lse(
        *one, packed_custom_mask=flashinfer.packbits(seen[0], "little"), causal=True
    )
    for x, y in zip(found, flashinfer.single_prefill_with_kv_cache_return_lse(*one, custom_mask=seen[0]), strict=True):
        assert torch.equal(x, y)


BAD = {
    "bitorder is 'middle'; it must be big or little": lambda: flashinfer.packbits(torch.ones(3), "middle"),
    "x is 3; it must be a tensor": lambda: flashinfer.packbits(3),
    "indptr is [0, 2]; it must begin with 0": lambda: flashinfer.segment_packbits(torch.ones(3), torch.tensor([0, 2])),
}


@pytest.mark.parametrize("sentence", BAD)
def test_what_is_refused_is_one_sentence(sentence):
    with pytest.raises(AttentionError) as found:
        BAD[sentence]()
    (reason,) = found.value.reasons
    assert sentence in reason


def test_arguments_of_decode_that_change_nothing():
    wrapper, given, call = decode(Batch(queries=(1,) * 4))
    assert not wrapper.use_tensor_cores
    assert flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, use_tensor_cores=True).use_tensor_cores
    wrapper.plan(*given)
    expected = wrapper.run(*call)
    wrapper.plan(*given, is_causal=True)
    assert torch.equal(wrapper.run(*call), expected)
    for wrong in (False, "yes"):
        with pytest.raises(AttentionError, match=f"^is_causal is {wrong!r}; new tokens see each other causally"):
            wrapper.plan(*given, is_causal=wrong)
