"""What the adapters hand to the kernels, in the simulator: masks made for transformers, vLLM's cache and batches."""

import functools
import importlib
import math
from itertools import product

import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from tests.drawn import drawn
from tests.unit.integrations import vllm_double
from warpattn.reference import reference

LIMIT = 4e-3  # fp16 rounds values below 4 by at most 1e-3
KEYS = 200


def check(q, k, v, out, **modifiers):
    expected, _ = reference(q, k, v, **modifiers)
    assert torch.isfinite(out).all()
    assert (out - expected).abs().max() < LIMIT


# What kernels are given is the same on every architecture, and those of CDNA compile fastest.
KINDS = ("left padding", "padding with holes", "room after the rows", "chunks")


@pytest.mark.parametrize(
    ("kind", "arch"), drawn(product(KINDS, ("sm90", "gfx942")), [(kind, "gfx942") for kind in KINDS])
)
def test_masks_of_transformers(kind, arch):
    pytest.importorskip("transformers")
    from transformers.masking_utils import chunked_causal_mask_function, sliding_window_causal_mask_function

    from warpattn.integrations.transformers import build_mask

    real = torch.arange(KEYS) >= torch.tensor([[0], [70]])
    queries, options = KEYS, {"attention_mask": real}
    if kind == "padding with holes":
        options = {"attention_mask": real & (torch.arange(KEYS) % 7 != 3)}
    elif kind == "room after the rows":
        queries, options = 3, {"q_offset": torch.tensor(120), "mask_function": sliding_window_causal_mask_function(90)}
    elif kind == "chunks":
        options |= {"mask_function": chunked_causal_mask_function(48, torch.tensor([0, 70]))}
    mask = build_mask(2, queries, KEYS, **options).mask
    q, k, v = (torch.randn(2, rows, heads, 64).half() for rows, heads in ((queries, 4), (KEYS, 2), (KEYS, 2)))
    out = wa.attention(q, k, v, mask=mask, backend=f"simulate:{arch}")
    check(q, k, v, out, mask=mask)


@pytest.mark.parametrize("arch", drawn(["sm90", "sm100", "gfx942"], ["gfx942"]))
def test_steps_of_vllm(monkeypatch, arch):
    """Prefill, chunks beside decoding requests, decode: ragged and paged kernels on views of vLLM's cache."""
    vllm_double.install(monkeypatch)
    vllm = importlib.import_module("warpattn.integrations.vllm")
    impl = importlib.import_module("warpattn.integrations.vllm.impl")
    for name in ("attention_paged", "attention_varlen"):
        monkeypatch.setattr(impl, name, functools.partial(getattr(wa, name), backend=f"simulate:{arch}"))
    engine = vllm_double.Engine((4, 2, 64), torch.float16)
    layer = vllm.WarpattnImpl(4, 64, 0.125, 2, sliding_window=20)
    for new in ({"a": 21, "b": 5, "c": 40}, {"a": 1, "b": 1, "c": 17, "d": 30}, dict.fromkeys("abcd", 1)):
        batch, q, k, v = engine.step(new)
        metadata = vllm.WarpattnMetadataBuilder(None, [], None, q.device).build(0, batch)
        out = torch.full_like(q, torch.nan)
        layer.do_kv_cache_update(None, k, v, engine.cache, batch.slot_mapping)
        layer.forward(None, q, k, v, engine.cache, metadata, out)
        rows = torch.split(torch.arange(len(q)), list(new.values()))
        for name, own in zip(new, rows, strict=True):
            keys, values = engine.history[name]
            check(q[own][None], keys[None], values[None], out[own][None], mask=wa.SlidingWindow(20))


@pytest.mark.parametrize(("window", "arch"), drawn(product([None, 20], ["sm90", "gfx942"]), [(20, "gfx942")]))
def test_images_of_vllm_see_both_directions(monkeypatch, window, arch):
    """A fresh step and one with context: images reach above and, past the window, below a tile of rows."""
    vllm_double.install(monkeypatch)
    vllm = importlib.import_module("warpattn.integrations.vllm")
    impl = importlib.import_module("warpattn.integrations.vllm.impl")
    for name in ("attention_paged", "attention_varlen"):
        monkeypatch.setattr(impl, name, functools.partial(getattr(wa, name), backend=f"simulate:{arch}"))
    engine = vllm_double.Engine((4, 2, 64), torch.float16)
    layer = vllm.WarpattnImpl(4, 64, 0.125, 2, sliding_window=window)
    builder = vllm.WarpattnMetadataBuilder(None, [], None, torch.device("cpu"))
    images = {"a": [(30, 110), (150, 300)], "b": [(1, 3)], "c": []}
    for new in ({"a": 130, "b": 5}, {"b": 1, "a": 180, "c": 17}):
        batch, q, k, v = engine.step(new, mm_req_doc_ranges={index: images[name] for index, name in enumerate(new)})
        metadata, out = builder.build(0, batch), torch.full_like(q, torch.nan)
        assert metadata.images is not None
        layer.do_kv_cache_update(None, k, v, engine.cache, batch.slot_mapping)
        layer.forward(None, q, k, v, engine.cache, metadata, out)
        for name, own in zip(new, torch.split(torch.arange(len(q)), list(new.values())), strict=True):
            keys, values = engine.history[name]
            at = torch.arange(len(keys))
            row, key = at[len(keys) - len(own) :, None], at[None]
            seen = (key <= row) & (row - key < (window or len(keys)))
            for first, last in images[name]:
                seen |= (row >= first) & (row <= last) & (key >= first) & (key <= last)
            check(q[own][None], keys[None], values[None], out[own][None], mask=wa.Materialized(seen[None]))


@pytest.mark.parametrize("arch", drawn(["sm90", "gfx942"], ["gfx942"]))
def test_masks_of_flashinfers_batches(arch):
    """A bool for each pair of a query and a key of every request, end to end."""
    from warpattn.integrations.flashinfer.masks import flat_mask

    queries, keys = torch.tensor([3, 0, 70]), torch.tensor([40, 9, 150])
    cu_q, cu_k = (torch.nn.functional.pad(x.cumsum(0), (1, 0)).int() for x in (queries, keys))
    seen = torch.rand(int((queries * keys).sum())) < 0.5
    mask = wa.SlidingWindow(100) & flat_mask(seen, cu_q, keys, torch.device("cpu"))
    q, k, v = (torch.randn(int(n), heads, 64).half() for n, heads in ((cu_q[-1], 4), (cu_k[-1], 2), (cu_k[-1], 2)))
    out = wa.attention_varlen(q, k, v, wa.Ragged(cu_q, cu_k), mask=mask, backend=f"simulate:{arch}")
    parts = seen.split((queries * keys).tolist())
    for b, (rows, part) in enumerate(zip(queries.tolist(), parts, strict=True)):
        at = torch.arange(int(keys[b]))
        near = at[len(at) - rows :, None] - at[None] < 100
        own = wa.Materialized((part.view(rows, len(at)) & near & (at[None] <= at[len(at) - rows :, None]))[None])
        chosen = slice(int(cu_k[b]), int(cu_k[b + 1]))
        mine = slice(int(cu_q[b]), int(cu_q[b + 1]))
        if rows:
            check(q[None, mine], k[None, chosen], v[None, chosen], out[None, mine], mask=own)


@pytest.mark.full
def test_latent_attention_of_flashinfer(monkeypatch):
    """Queries in two tensors, a cache whose parts are views of one buffer, pages in lists, an LSE in base 2."""
    flashinfer = importlib.import_module("warpattn.integrations.flashinfer")
    mla = importlib.import_module("warpattn.integrations.flashinfer.mla")
    monkeypatch.setattr(mla, "attention_paged", functools.partial(wa.attention_paged, backend="simulate:sm90"))
    cache, indices = torch.randn(8, 16, 576).half(), torch.tensor([6, 1, 3, 0, 7], dtype=torch.int32)
    cu_q, indptr, lengths = (torch.tensor(x, dtype=torch.int32) for x in ((0, 2, 4), (0, 3, 5), (41, 20)))
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(torch.empty(0, dtype=torch.uint8))
    sizes = {"num_heads": 16, "head_dim_ckv": 512, "head_dim_kpe": 64, "page_size": 16, "sm_scale": 0.06}
    wrapper.plan(cu_q, indptr, indices, lengths, **sizes, causal=True)
    q = torch.randn(4, 16, 576).half()
    apart = (q[..., :512].clone(), q[..., 512:].clone())
    out, lse = wrapper.run(*apart, *cache.split([512, 64], -1), return_lse=True)
    for b, (pages, keys) in enumerate(((indices[:3], 41), (indices[3:], 20))):
        k = cache[pages.long()].flatten(0, 1)[None, :keys, None]
        own, natural = reference(q[None, 2 * b : 2 * b + 2], k, k[..., :512], mask=wa.Causal(), scale=0.06)
        assert (out[2 * b : 2 * b + 2] - own[0]).abs().max() < LIMIT
        assert (lse[2 * b : 2 * b + 2] * math.log(2) - natural[0].T).abs().max() < LIMIT
    wrapper.plan(torch.tensor([0, 1, 4]), indptr, indices, lengths, **sizes, causal=True)
    out = wrapper.run(*apart, *cache.split([512, 64], -1))  # requests with different numbers of tokens
    for rows, pages, keys in ((slice(0, 1), indices[:3], 41), (slice(1, 4), indices[3:], 20)):
        k = cache[pages.long()].flatten(0, 1)[None, :keys, None]
        own, _ = reference(q[None, rows], k, k[..., :512], mask=wa.Causal(), scale=0.06)
        assert (out[rows] - own[0]).abs().max() < LIMIT
