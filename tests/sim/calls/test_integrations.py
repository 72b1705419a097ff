"""What the adapters hand to the kernels, in the simulator: masks made for transformers, vLLM's cache and batches."""

import functools
import importlib

import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from tests.unit.integrations import vllm_double
from warpattn.reference import reference

LIMIT = 4e-3  # fp16 rounds values below 4 by at most 1e-3
KEYS = 200


def check(q, k, v, out, **modifiers):
    expected, _ = reference(q, k, v, **modifiers)
    assert torch.isfinite(out).all()
    assert (out - expected).abs().max() < LIMIT


@pytest.mark.parametrize("arch", ["sm90", "gfx942"])
@pytest.mark.parametrize("kind", ["left padding", "padding with holes", "room after the rows", "chunks"])
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


@pytest.mark.parametrize("arch", ["sm90", "gfx942"])
def test_steps_of_vllm(monkeypatch, arch):
    """Prefill, chunks beside decoding requests, decode: ragged and paged kernels on views of vLLM's cache."""
    vllm_double.install(monkeypatch)
    vllm = importlib.import_module("warpattn.integrations.vllm")
    impl, metadata = (importlib.import_module(f"warpattn.integrations.vllm.{name}") for name in ("impl", "metadata"))
    monkeypatch.setattr(metadata, "takes_ragged_pages", lambda device: arch == "sm90")
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
