"""vLLM's latent attention against a stand-in of its classes: pages of latents, chunks of prompts, context of ranks."""

import importlib
from types import SimpleNamespace

import pytest
import torch

import warpattn as wa
from tests.unit.integrations import vllm_double
from warpattn.errors import AttentionError
from warpattn.masks.base import InOrder
from warpattn.reference import reference

HEADS, LATENT, ROTARY, SCALE, PAGE = 3, 16, 8, 0.3, 16
WHOLE = LATENT + ROTARY


@pytest.fixture
def latent(monkeypatch):
    """The module, imported against the stand-in."""
    vllm_double.install(monkeypatch)
    return importlib.import_module("warpattn.integrations.vllm.latent")


def impl(latent, ranks=1, **named):
    made = latent.WarpattnMLAImpl(scale=SCALE, kv_lora_rank=LATENT, **named)
    made.dcp_world_size = ranks
    return made


def cached(made, text):
    """(cache, table, lengths) of two requests with these latents (tokens, 24) each; the last slot is padding."""
    cache = torch.full((9, PAGE, WHOLE), 7.0)
    table = torch.tensor([[4, 2, 8], [1, 7, 3]], dtype=torch.int32)
    for row, tokens in zip(table, text, strict=True):
        slots = torch.tensor([int(row[t // PAGE]) * PAGE + t % PAGE for t in range(len(tokens))] + [-1])
        new = torch.cat((tokens, torch.full((1, WHOLE), 9.0)))
        made.do_kv_cache_update(new[:, :LATENT], new[:, None, LATENT:], cache, slots, "auto", torch.ones(()))
    return cache, table, torch.tensor([len(tokens) for tokens in text], dtype=torch.int32)


def step(table, lengths):
    return SimpleNamespace(decode=SimpleNamespace(block_table=table, seq_lens=lengths))


def expected(q, tokens):
    """Of new tokens (n, heads, 24) at the end of a text."""
    keys = tokens[None, :, None]
    out, lse = reference(q[None], keys, keys[..., :LATENT], mask=wa.Causal(), scale=SCALE)
    return out[0], lse[0].T


def test_graphs_hold_decoding_where_one_was_captured(latent, monkeypatch):
    for hopper, wanted in ((True, "UNIFORM_BATCH"), (False, "NEVER")):
        monkeypatch.setattr(latent, "on_hopper", lambda hopper=hopper: hopper)
        found = latent.WarpattnMLABuilder.get_cudagraph_support(None, None)
        assert found is getattr(latent.AttentionCGSupport, wanted)


@pytest.mark.parametrize("drafts", [1, 3])
def test_decode_over_pages_of_latents(latent, drafts):
    made, text = impl(latent), [torch.randn(n, WHOLE) for n in (37, 5)]
    cache, table, lengths = cached(made, text)
    q = torch.randn(2 * drafts, HEADS, WHOLE)
    for given in (q, (q[..., :LATENT], q[..., LATENT:])):
        out, lse = made.forward_mqa(given, cache, step(table, lengths), None)
        assert lse is None
        for one, new, tokens in zip(out.split(drafts), q.split(drafts), text, strict=True):
            torch.testing.assert_close(one, expected(new, tokens)[0])


@pytest.mark.parametrize("drafts", [1, 3])
def test_batch_invariance_is_the_plans(latent, monkeypatch, drafts):
    monkeypatch.setattr(vllm_double.envs, "VLLM_BATCH_INVARIANT", True)
    builder = latent.WarpattnMLABuilder(SimpleNamespace(**dict.fromkeys(latent.LAYER)))
    made, text = impl(latent), [torch.randn(n, WHOLE) for n in (37, 5)]
    cache, table, lengths = cached(made, text)
    for requests in (2, 1):
        metadata = builder.build(decode=step(table[:requests], lengths[:requests]).decode)
        q = torch.randn(requests * drafts, HEADS, WHOLE)
        for given in (q, (q[..., :LATENT], q[..., LATENT:])):
            out, lse = made.forward_mqa(given, cache, metadata, None)
            assert lse is None
            for one, new, tokens in zip(out.split(drafts), q.split(drafts), text, strict=False):
                torch.testing.assert_close(one, expected(new, tokens)[0])
    plans = metadata.plans._plans.values()
    assert len(plans) == 4 and all(isinstance(plan._tail["mask"], InOrder) for plan in plans)
    monkeypatch.setattr(latent.WarpattnMLAImpl, "dcp_world_size", 2)  # vLLM says so before it makes a layer
    with pytest.raises(AttentionError, match="VLLM_BATCH_INVARIANT is set and 2 ranks share the context"):
        impl(latent)


def test_queries_and_outputs_are_not_rounded_by_what_another_backend_can(latent):
    """vLLM asks the backend of prompts that it chose, in whose place ours is."""
    builder = latent.WarpattnMLABuilder
    assert builder.determine_prefill_query_data_type(SimpleNamespace(), torch.bfloat16) == torch.bfloat16
    assert not impl(latent).fused_output_quant_supported("fp8")


def test_prompts_of_an_invariant_batch_are_planned_so(latent, monkeypatch):
    theirs = SimpleNamespace(**dict.fromkeys(latent.LAYER) | {"scale": SCALE})
    prompts = latent.WarpattnMLABuilder(theirs)._prefill_backend
    assert latent.WarpattnMLABuilder(theirs).build().plans is None
    cu = torch.tensor([0, 5, 35], dtype=torch.int32)
    prompts.prepare_metadata(SimpleNamespace(query_start_loc=cu, max_query_len=30))
    q, k, v = (torch.randn(35, HEADS, dim) for dim in (WHOLE, WHOLE, LATENT))
    wanted = prompts.run_prefill_new_tokens(q=q, k=k, v=v, return_softmax_lse=True)
    monkeypatch.setattr(vllm_double.envs, "VLLM_BATCH_INVARIANT", True)
    seen, plan = [], latent.PrefillPlan
    monkeypatch.setattr(latent, "PrefillPlan", lambda *x, **tail: seen.append(tail) or plan(*x, **tail))
    found = prompts.run_prefill_new_tokens(q=q, k=k, v=v, return_softmax_lse=True)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    chunk = SimpleNamespace(query_start_loc=cu, cu_seq_lens=cu, max_query_len=30, max_seq_len=30)
    prompts.run_prefill_context_chunk(q=q, k=k, v=v, chunk=chunk)
    assert [tail["batch_invariant"] for tail in seen] == [True, True]


def test_ranks_that_share_the_context_merge_by_the_lse(latent):
    """Every rank has every second token; one has none of the second request."""
    made, text = impl(latent, ranks=2), [torch.randn(n, WHOLE) for n in (37, 1)]
    q, parts = torch.randn(2, HEADS, WHOLE), []
    for rank in range(2):
        cache, table, lengths = cached(made, [tokens[rank::2] for tokens in text])
        parts += made.forward_mqa(q, cache, step(table, lengths), None)
    out_a, lse_a, out_b, lse_b = parts
    out, lse = wa.merge_states(out_a[:, None], lse_a[..., None], out_b[:, None], lse_b[..., None])
    for request, tokens in enumerate(text):
        wanted = expected(q[request, None], tokens)
        torch.testing.assert_close((out[request], lse[request].T), wanted)


def test_a_cache_of_bytes(latent):
    """DeepSeek's form: latents e4m3 with a scale per 128 columns, rotary parts bf16; slot -1 writes nothing."""
    made = latent.WarpattnMLAImpl(scale=SCALE, kv_lora_rank=512, kv_cache_dtype="fp8_ds_mla")
    shape = latent.WarpattnMLABackend.get_kv_cache_shape(5, PAGE, 1, 576, "fp8_ds_mla")
    cache, slots = torch.zeros(shape, dtype=torch.uint8), torch.tensor([3 * PAGE + 15, 1 * PAGE, -1])
    latents, rotary = torch.randn(3, 512).bfloat16(), torch.randn(3, 1, 64).bfloat16()
    made.do_kv_cache_update(latents, rotary, cache, slots, "fp8_ds_mla", None)
    assert cache.shape == (5, PAGE, 656) and int((cache != 0).any(-1).sum()) == 2
    q = torch.randn(2, HEADS, 512).bfloat16(), torch.randn(2, HEADS, 64).bfloat16()
    table, lengths = torch.tensor([[3], [1]], dtype=torch.int32), torch.tensor([16, 1], dtype=torch.int32)
    out, _ = made.forward_mqa(q, cache, step(table, lengths), None)
    stored = wa.quantize(latents[:2, None], per=128).dequantized()
    keys = torch.zeros(2, 16, 1, 576)
    keys[0, 15], keys[1, 0] = (torch.cat((stored[n], rotary[n].float()), -1) for n in range(2))
    for n, length in enumerate((16, 1)):
        own = keys[n : n + 1, :length]
        wanted, _ = reference(torch.cat(q, -1)[n : n + 1, None].float(), own, own[..., :512], scale=SCALE)
        torch.testing.assert_close(out[n], wanted[0, 0].bfloat16())


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_cache_of_8_bits(latent, shape):
    """Latents and rotary parts of e4m3 with the layer's scale; vLLM hands the cache over as bytes."""
    made, scale = impl(latent, kv_cache_dtype="fp8"), torch.full(shape, 0.02)
    cache, slots = torch.zeros(5, PAGE, 2 * LATENT, dtype=torch.uint8), torch.tensor([3 * PAGE + 15, 1 * PAGE, -1])
    new = torch.randn(3, 2 * LATENT)
    made.do_kv_cache_update(new[:, :LATENT], new[:, None, LATENT:], cache, slots, "fp8", scale)
    assert int((cache != 0).any(-1).sum()) == 2
    q = torch.randn(2, HEADS, LATENT), torch.randn(2, HEADS, LATENT)
    table, lengths = torch.tensor([[3], [1]], dtype=torch.int32), torch.tensor([16, 1], dtype=torch.int32)
    for given in (cache, cache.view(torch.float8_e4m3fn)):
        out, _ = made.forward_mqa(q, given, step(table, lengths), SimpleNamespace(_k_scale=scale))
        keys = torch.zeros(2, 16, 1, 2 * LATENT)
        stored = wa.quantize(new[:2, None], scale=torch.tensor(0.02)).dequantized()
        keys[0, 15], keys[1, 0] = stored
        for n, length in enumerate((16, 1)):
            own = keys[n : n + 1, :length]
            wanted, _ = reference(torch.cat(q, -1)[n : n + 1, None], own, own[..., :LATENT], scale=SCALE)
            torch.testing.assert_close(out[n], wanted[0, 0])


@pytest.mark.parametrize("kind", ["fp8_e5m2", "nvfp4_ds_mla"])
def test_caches_without_kernels_are_refused(latent, kind):
    with pytest.raises(AttentionError, match=f"kv_cache_dtype is {kind!r}; .* has auto, .* fp8, fp8_e4m3, fp8_ds_mla"):
        impl(latent, kv_cache_dtype=kind)


def test_prompts_and_chunks_of_their_context(latent):
    theirs = SimpleNamespace(**dict.fromkeys(latent.LAYER) | {"scale": SCALE})
    prompts = latent.WarpattnMLABuilder(theirs)._prefill_backend
    old, new = [20, 0], [5, 30]  # tokens of two requests
    cu_old, cu_new = (torch.tensor([0, n[0], sum(n)], dtype=torch.int32) for n in (old, new))
    prompts.prepare_metadata(
        SimpleNamespace(
            query_start_loc=cu_new, max_query_len=30,
            chunked_context=SimpleNamespace(cu_seq_lens=cu_old[None], max_seq_lens=[20]),
        )
    )  # fmt: skip
    q, k, v = (torch.randn(35, HEADS, dim) for dim in (WHOLE, WHOLE, LATENT))
    k_old, v_old = torch.randn(20, HEADS, WHOLE), torch.randn(20, HEADS, LATENT)
    chunk = SimpleNamespace(query_start_loc=cu_new, cu_seq_lens=cu_old, max_query_len=30, max_seq_len=20)
    suffix = prompts.run_prefill_new_tokens(q=q, k=k, v=v, return_softmax_lse=True)
    for named in ({"chunk": chunk}, {"chunk_idx": 0}):  # as newer and older versions call it
        context = prompts.run_prefill_context_chunk(q=q, k=k_old, v=v_old, **named)
        out, _ = wa.merge_states(*context, *suffix)
        for request, rows in enumerate((slice(0, 5), slice(5, 35))):
            keys, values = (torch.cat((a[: old[request]], b[rows])) for a, b in ((k_old, k), (v_old, v)))
            wanted, _ = reference(q[None, rows], keys[None], values[None], mask=wa.Causal(), scale=SCALE)
            torch.testing.assert_close(out[rows], wanted[0])
    alone = prompts.run_prefill_new_tokens(q=q, k=k, v=v, return_softmax_lse=False)
    torch.testing.assert_close(alone, suffix[0])
    with pytest.raises(AttentionError, match="output_scale"):
        prompts.run_prefill_new_tokens(q, k, v, False, output_scale=torch.ones(1))


@pytest.mark.parametrize("name", ["sliding_window", "logits_soft_cap", "alibi_slopes", "indexer"])
def test_layers_it_does_not_have_are_refused(latent, name):
    with pytest.raises(AttentionError, match=f"{name} is an option of this model"):
        impl(latent, **{name: 3})


def test_what_vllm_asks_before_it_chooses(latent):
    backend, card = latent.WarpattnMLABackend, SimpleNamespace
    assert backend.get_name() == "CUSTOM" and backend.get_supported_head_sizes() == [576]
    assert backend.get_impl_cls() is latent.WarpattnMLAImpl and backend.get_builder_cls() is latent.WarpattnMLABuilder
    assert backend.get_supported_kernel_block_sizes() == [vllm_double.MultipleOf(16)]
    found = [backend.supports_compute_capability(card(major=m, minor=0)) for m in (8, 9, 10)]
    assert found == [False, True, True], "kernels for prompts of head dim 192"
