"""FlashInfer's names in its modules, appending to pages, merging many states, a factor for values of 16 bits."""

import math
from importlib import import_module

import pytest
import torch

import warpattn.integrations.flashinfer as flashinfer
from tests.unit.integrations.test_flashinfer import DIM, HEADS, HEADS_KV, KEYS, PAGE, QUERIES, WORKSPACE, Batch, offsets
from warpattn import AttentionError

MODULES = {
    "decode": ("BatchDecodeWithPagedKVCacheWrapper", "single_decode_with_kv_cache"),
    "prefill": ("BatchPrefillWithRaggedKVCacheWrapper", "single_prefill_with_kv_cache_return_lse"),
    "cascade": ("MultiLevelCascadeAttentionWrapper", "merge_state", "merge_state_in_place", "merge_states"),
    "mla": ("BatchMLAPagedAttentionWrapper",),
    "page": ("append_paged_kv_cache", "append_paged_mla_kv_cache", "get_batch_indices_positions", "get_seq_lens"),
    "quantization": ("packbits", "segment_packbits"),
}


@pytest.mark.parametrize("module", MODULES)
def test_names_are_in_their_modules(module):
    for name in MODULES[module]:
        assert getattr(import_module(f"{flashinfer.__name__}.{module}"), name) is getattr(flashinfer, name)


@pytest.mark.parametrize("factor", [2.0, torch.tensor([2.0]), torch.tensor(2)], ids=["number", "tensor", "int"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_factor_for_values_of_16_bits(dtype, factor):
    batch = Batch(tensor=False)
    q, cache = torch.cat(batch.q).to(dtype), [x.to(dtype) for x in batch.cache]
    k, v = (torch.cat(side).to(dtype) for side in batch.keys)
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    paged.plan(offsets(QUERIES), *batch.pages, HEADS, HEADS_KV, DIM, PAGE)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    ragged.plan(offsets(QUERIES), offsets(KEYS), HEADS, HEADS_KV, DIM)
    decode, one = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE), q[:4]
    decode.plan(*batch.pages, HEADS, HEADS_KV, DIM, PAGE)
    calls = [
        lambda **how: paged.run(q, cache, return_lse=True, **how),
        lambda **how: ragged.run(q, k, v, return_lse=True, **how),
        lambda **how: decode.run(one, cache, return_lse=True, **how),
        lambda **how: flashinfer.single_decode_with_kv_cache(q[0], k, v, return_lse=True, **how),
        lambda **how: flashinfer.single_prefill_with_kv_cache(q, k, v, return_lse=True, **how),
    ]
    for i, call in enumerate(calls):
        (plain, lse), (out, same) = call(), call(v_scale=factor)
        assert out.dtype == dtype and torch.equal(out, plain * 2) and torch.equal(same, lse)
        if i < 3:
            target = torch.empty_like(plain)
            assert call(v_scale=factor, out=target)[0] is target and torch.equal(target, out)


def test_places_of_new_tokens():
    """Two requests without new tokens, padding at the end, and buffers of the caller."""
    starts, lengths = torch.tensor([0, 1, 1, 3, 6, 6]).int(), torch.tensor([5, 2, 5, 4, 0]).int()
    expected = [0, 2, 2, 3, 3, 3, -1, -1], [4, 3, 4, 1, 2, 3, 0, 0]
    buffers = [torch.full((8,), 9, dtype=torch.int32) for _ in range(2)]
    for given in ([], buffers):
        found = flashinfer.get_batch_indices_positions(starts, lengths, 8, *given)
        assert [x.tolist() for x in found] == [*expected] and all(x.dtype == torch.int32 for x in found)
    assert found[0] is buffers[0] and found[1] is buffers[1]
    nothing = flashinfer.get_batch_indices_positions(torch.zeros(1).int(), torch.zeros(0).int(), 2)
    assert [x.tolist() for x in nothing] == [[-1, -1], [0, 0]]
    assert flashinfer.get_seq_lens(torch.tensor([0, 2, 2, 3]), torch.tensor([3, 0, 4]), 4).tolist() == [7, 0, 4]


def appended(cache, new, layout):
    """Append the last tokens of each request, and padding."""
    batch = Batch()
    starts = offsets(QUERIES)
    lengths = flashinfer.get_seq_lens(batch.indptr, batch.last, PAGE) * (torch.tensor(KEYS) > 0)
    places = flashinfer.get_batch_indices_positions(starts, lengths, len(new[0]))
    flashinfer.append_paged_kv_cache(*new, *places, cache, batch.indices, batch.indptr, batch.last, layout)
    return batch, starts, lengths


@pytest.mark.parametrize(("layout", "tensor"), [("NHD", True), ("HND", False), ("HND", True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_appended_keys_and_values_are_those_of_the_pages(layout, tensor, dtype):
    """Also of 8 bits into 8 bits, where each stays as it is."""
    shape = (PAGE, HEADS_KV, DIM) if layout == "NHD" else (HEADS_KV, PAGE, DIM)
    cache = torch.zeros(16, 2, *shape).to(dtype)
    cache = cache if tensor else (cache[:, 0].clone(), cache[:, 1].clone())
    new = [torch.randn(sum(QUERIES) + 2, HEADS_KV, DIM).to(dtype) for _ in range(2)]
    batch, starts, lengths = appended(cache, new, layout)
    caches = [cache[:, i] if tensor else cache[i] for i in range(2)]
    written = torch.zeros(16, PAGE, dtype=torch.bool)
    for b in range(len(QUERIES)):
        for t in range(QUERIES[b]):
            at = int(lengths[b]) - QUERIES[b] + t
            page = int(batch.indices[int(batch.indptr[b]) + at // PAGE])
            written[page, at % PAGE] = True
            for pages, x in zip(caches, new, strict=True):
                row = (pages if layout == "NHD" else pages.transpose(1, 2))[page, at % PAGE]
                assert torch.equal(row.float(), x[int(starts[b]) + t].float())
    for pages in caches:
        rows = pages if layout == "NHD" else pages.transpose(1, 2)
        assert not rows.float()[~written].any()


@pytest.mark.parametrize("together", [True, False])
def test_appended_latents(together):
    parts = torch.zeros(6, PAGE, 576).split([512, 64], -1)
    ckv, kpe = parts if together else [x.clone() for x in parts]
    new = torch.randn(2, 512), torch.randn(2, 64)
    lists = torch.tensor([3, 5]).int(), torch.tensor([0, 2]).int(), torch.tensor([1]).int()
    flashinfer.append_paged_mla_kv_cache(*new, torch.zeros(2).int(), torch.tensor([3, 4]).int(), ckv, kpe, *lists)
    for cache, x in zip((ckv, kpe), new, strict=True):
        assert torch.equal(cache[3, 3], x[0]) and torch.equal(cache[5, 0], x[1])
        assert int(cache.any(-1).sum()) == 2


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"positions": [0, 9]}, "token 1 goes to position 9 of request 0; kv_indptr and kv_indices must list its page"),
        ({"batch_indices": [0, 1]}, "token 1 goes to position 1 of request 1;"),
        ({"positions": [0]}, "positions has 1 element; it must have one a new token, 2"),
        ({"append_value": torch.ones(2, 3, DIM)}, "append_value has 3 heads"),
        ({"append_value": torch.ones(2, HEADS_KV, DIM).half()}, "append_value has dtype torch.float16"),
        ({"kv_layout": "DHN"}, "kv_layout is 'DHN'"),
        ({"paged_kv_cache": None}, "paged_kv_cache is None"),
        ({"positions": [0.0, 1.0]}, "positions has dtype torch.float32"),
    ],
)
def test_what_is_refused(changes, sentence):
    given = {
        "append_key": torch.ones(2, HEADS_KV, DIM), "append_value": torch.ones(2, HEADS_KV, DIM),
        "batch_indices": [0, 0], "positions": [0, 1], "paged_kv_cache": torch.zeros(2, 2, PAGE, HEADS_KV, DIM),
        "kv_indices": [1], "kv_indptr": [0, 1], "kv_last_page_len": [2],
    } | changes  # fmt: skip
    given = {name: torch.tensor(x) if isinstance(x, list) else x for name, x in given.items()}
    with pytest.raises(AttentionError, match=f"^{sentence}"):
        flashinfer.append_paged_kv_cache(**given)


@pytest.mark.parametrize("count", [16, 17, 300])
def test_any_number_of_states_is_merged(count: int):
    v, s = torch.randn(5, count, HEADS, DIM).bfloat16(), torch.randn(5, count, HEADS) * 3
    out, lse = flashinfer.merge_states(v, s)
    weights = (s.double() * math.log(2)).softmax(1)
    expected = (v.double() * weights[..., None]).sum(1)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, atol=2**-8, rtol=2**-8)  # rounded once
    torch.testing.assert_close(lse, ((s.double() * math.log(2)).logsumexp(1) / math.log(2)).float())
