"""SGLang's own classes on the CPU: its registry, cache pools, attention layers and batches around our backend.

The engine itself needs a card; what it calls is called here in its order, through prompts, chunks, mixed steps and
decoding, eagerly and as it fills captured steps. torchvision, which it imports for images, is a stand-in.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

import warpattn as wa
from warpattn.errors import AttentionError

pytestmark = pytest.mark.engine
HEADS, HEADS_KV, DIM, PAGE, CONTEXT, CACHE = 4, 2, 32, 16, 160, 960


class Images(ModuleType):
    """A module with whatever is taken from it."""

    __path__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> MagicMock:
        return MagicMock()


@pytest.fixture(scope="module")
def sglang():
    """What the tests take from it, after our plug-in's registration."""
    pytest.importorskip("sglang")
    for name in ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional"):
        sys.modules["torchvision" + name] = Images("torchvision" + name)
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    from warpattn.integrations.sglang_plugin import register

    register()
    assert "warpattn" in ATTENTION_BACKEND_CHOICES
    return SimpleNamespace(
        backends=ATTENTION_BACKENDS, AttentionType=AttentionType, RadixAttention=RadixAttention,
        MHATokenToKVPool=MHATokenToKVPool, ReqToTokenPool=ReqToTokenPool, ForwardBatch=ForwardBatch,
        ForwardMode=ForwardMode,
    )  # fmt: skip


class Engine:
    """Requests with their slots in SGLang's pools, and the texts of keys and values so far."""

    def __init__(self, sglang, page: int = PAGE, **runner) -> None:
        torch.manual_seed(0)
        self.sglang, self.page = sglang, page
        self.requests = sglang.ReqToTokenPool(6, CONTEXT, "cpu", False)
        self.pool = sglang.MHATokenToKVPool(
            CACHE, page, torch.float32, HEADS_KV, DIM, 1, "cpu", False, enable_alt_stream=False
        )
        self.pages = (torch.randperm(CACHE // page - 1) + 1).tolist()
        runner = {"use_mla_backend": False, "token_to_kv_pool": self.pool} | runner
        self.backend = sglang.backends["warpattn"](
            SimpleNamespace(req_to_token_pool=self.requests, page_size=page, **runner)
        )
        self.texts: dict[int, list[torch.Tensor]] = {}

    def slots(self, request: int, start: int, stop: int) -> list[int]:
        """Of new tokens; pages are taken as they are needed."""
        row = self.requests.req_to_token[request]
        for token in range(start, stop):
            first = self.pages.pop() * self.page if token % self.page == 0 else int(row[token - 1]) + 1
            row[token] = first
        return row[start:stop].tolist()

    def step(self, layer, new: dict[int, int], captured: bool = False, **named):
        """Output and queries of every request's new tokens."""
        counts = list(new.values())
        q = torch.randn(sum(counts), HEADS * DIM)
        k, v = torch.randn(2, len(q), HEADS_KV * DIM)
        starts, slots = [], []
        for (request, count), own in zip(new.items(), zip(k.split(counts), v.split(counts), strict=True), strict=True):
            text = self.texts.setdefault(request, [torch.empty(0, HEADS_KV, DIM)] * 2)
            starts.append(len(text[0]))
            slots += self.slots(request, starts[-1], starts[-1] + count)
            self.texts[request] = [torch.cat((a, b.view(-1, HEADS_KV, DIM))) for a, b in zip(text, own, strict=True)]
        batch = self.batch(list(new), starts, counts, slots)
        init = self.backend.init_forward_metadata_out_graph if captured else self.backend.init_forward_metadata
        init(batch)
        k, v = (x.view(-1, HEADS_KV, DIM) for x in (k, v))  # as RadixAttention does
        out = self.backend.forward(q, k, v, layer, batch, **named)
        parts = (x.view(-1, HEADS, DIM).split(counts) for x in (out, q))
        return dict(zip(new, zip(*parts, strict=True), strict=True))

    def batch(self, requests, starts, counts, slots):
        decodes = all(count == 1 for count in counts)
        lengths = torch.tensor([start + count for start, count in zip(starts, counts, strict=True)])
        mode = self.sglang.ForwardMode.DECODE if decodes else self.sglang.ForwardMode.MIXED
        batch = self.sglang.ForwardBatch(
            forward_mode=mode, batch_size=len(requests), input_ids=torch.zeros(len(slots), dtype=torch.int64),
            req_pool_indices=torch.tensor(requests), seq_lens=lengths, out_cache_loc=torch.tensor(slots),
            seq_lens_sum=int(lengths.sum()), seq_lens_cpu=lengths,
        )  # fmt: skip
        if not decodes:
            batch.extend_seq_lens = torch.tensor(counts, dtype=torch.int32)
            batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu = list(counts), list(starts)
        return batch


def check(engine: Engine, found, **tail) -> None:
    for request, (out, q) in found.items():
        keys, values = engine.texts[request]
        expected = wa.attention(q[None], keys[None], values[None], backend="reference", **tail)[0]
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("kind", ["plain", "window", "soft-cap", "sinks", "pages-of-1"])
def test_steps(sglang, kind):
    options = {"window": {"sliding_window_size": 19}, "soft-cap": {"logit_cap": 5.0}}.get(kind, {})
    layer = sglang.RadixAttention(HEADS, DIM, 0.2, HEADS_KV, 0, **options)
    tail = {"mask": wa.SlidingWindow(20) if kind == "window" else wa.Causal(), "scale": 0.2}
    if kind == "soft-cap":
        tail["score"] = wa.SoftCap(5.0)
    named = {"sinks": torch.randn(HEADS)} if kind == "sinks" else {}
    engine = Engine(sglang, page=1 if kind == "pages-of-1" else PAGE)
    engine.backend.init_cuda_graph_state(4, 4)
    for new in ({1: 40, 2: 7}, {1: 1, 2: 1}, {1: 1, 3: 33, 2: 9}, {3: 20, 4: 50}):
        check(engine, engine.step(layer, new, **named), **tail, **named)
    for new in ({1: 1, 3: 1, 4: 1}, {2: 1, 1: 1}, {4: 1, 3: 1, 2: 1, 1: 1}):
        check(engine, engine.step(layer, new, captured=True, **named), **tail, **named)


def test_encoders_see_both_sides(sglang):
    layer = sglang.RadixAttention(HEADS, DIM, 0.2, HEADS_KV, 0, attn_type=sglang.AttentionType.ENCODER_ONLY)
    engine = Engine(sglang)
    check(engine, engine.step(layer, {1: 30, 2: 20}), mask=wa.Full(), scale=0.2)


def test_captured_tables_stay_where_they_are(sglang):
    """What a graph reads is refilled and not replaced, whatever the lengths."""
    layer, engine = sglang.RadixAttention(HEADS, DIM, 0.2, HEADS_KV, 0), Engine(sglang)
    engine.backend.init_cuda_graph_state(4, 4)
    engine.step(layer, {1: 40, 2: 90})
    places = set()
    for _ in range(3):
        engine.step(layer, {1: 1, 2: 1}, captured=True)
        step = engine.backend.forward_metadata
        places.add((step.table.data_ptr(), step.lengths.data_ptr(), step.cu_q.data_ptr(), step.table.shape))
    assert len(places) == 1
    assert engine.backend.get_cuda_graph_seq_len_fill_value() == 1


def test_what_it_has_not_is_one_sentence(sglang):
    engine = Engine(sglang)
    with pytest.raises(AttentionError, match="latent"):
        Engine(sglang, use_mla_backend=True)
    with pytest.raises(AttentionError, match="disable-hybrid-swa-memory"):
        Engine(sglang, token_to_kv_pool=object())
    layer = sglang.RadixAttention(HEADS, DIM, 0.2, HEADS_KV, 0, is_cross_attention=True)
    with pytest.raises(AttentionError, match="cross-attention"):
        engine.step(layer, {1: 5})
    plain = sglang.RadixAttention(HEADS, DIM, 0.2, HEADS_KV, 0)
    with pytest.raises(AttentionError, match="q_rope"):
        engine.step(plain, {1: 5}, q_rope=torch.ones(1))
