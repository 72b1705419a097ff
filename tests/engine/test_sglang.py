"""SGLang's own classes on the CPU: its registry, cache pools, attention layers and batches around our backend.

The engine itself needs a card; what it calls is called here in its order, through prompts, chunks, mixed steps and
decoding, eagerly and as it fills captured steps. torchvision, which it imports for images, is a stand-in.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import warpattn as wa
from warpattn.errors import AttentionError

pytestmark = pytest.mark.engine
HEADS, HEADS_KV, DIM, PAGE, CONTEXT, CACHE = 4, 2, 32, 16, 160, 960
MODEL = SimpleNamespace(is_encoder_decoder=False, is_local_attention_model=False)


def drafts_of(count: int, branches: int = 1):
    """What SGLang says of drafts with so many branches."""
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

    absent = dict.fromkeys(
        ("draft_token", "custom_mask", "positions", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling",
         "retrieve_cum_len", "capture_hidden_mode", "seq_lens_sum", "seq_lens_cpu")
    )  # fmt: skip
    return EagleVerifyInput(**absent, draft_token_num=count, spec_steps=count - 1, topk=branches)


class Engine:
    """Requests with their slots in SGLang's pools, and the texts of keys and values so far."""

    def __init__(self, sglang, page: int = PAGE, dtype: torch.dtype = torch.float32, **runner) -> None:
        torch.manual_seed(0)
        self.sglang, self.page = sglang, page
        self.requests = sglang.ReqToTokenPool(6, CONTEXT, "cpu", False)
        self.pool = runner.get("token_to_kv_pool") or sglang.MHATokenToKVPool(
            CACHE, page, dtype, HEADS_KV, DIM, 1, "cpu", False, enable_alt_stream=False
        )
        self.pages = (torch.randperm(CACHE // page - 1) + 1).tolist()
        defaults = {"use_mla_backend": False, "is_draft_worker": False, "model_config": MODEL}
        runner = defaults | {"token_to_kv_pool": self.pool} | runner
        self.backend = sglang.backends["warpattn"](
            SimpleNamespace(req_to_token_pool=self.requests, page_size=page, **runner)
        )
        self.texts: dict[int, list[torch.Tensor]] = {}
        self.drafts = False

    def slots(self, request: int, start: int, stop: int) -> list[int]:
        """Of new tokens; pages are taken as they are needed."""
        row = self.requests.req_to_token[request]
        for token in (token for token in range(start, stop) if not row[token]):  # another layer may have taken them
            first = int(row[token - 1]) + 1
            if token % self.page == 0:
                first = self.pages.pop() * self.page
                self.taken(first // self.page)
            row[token] = first
        return row[start:stop].tolist()

    def taken(self, page: int) -> None:
        """A request has taken a page."""

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

    def verify(self, layer, new: dict[int, int], kept: int, captured: bool = False):
        """Output and queries of drafts, the first `kept` of which a request keeps, with its text so far."""
        self.drafts = True
        found = self.step(layer, new, captured)
        self.drafts = False
        texts = {request: self.texts[request] for request in new}
        for request, count in new.items():
            self.texts[request] = [x[: len(x) - count + kept] for x in texts[request]]
        return found, texts

    def batch(self, requests, starts, counts, slots):
        decodes = all(count == 1 for count in counts)
        lengths = torch.tensor([start + count for start, count in zip(starts, counts, strict=True)])
        mode = self.sglang.ForwardMode.DECODE if decodes else self.sglang.ForwardMode.MIXED
        batch = self.sglang.ForwardBatch(
            forward_mode=mode, batch_size=len(requests), input_ids=torch.zeros(len(slots), dtype=torch.int64),
            req_pool_indices=torch.tensor(requests), seq_lens=lengths, out_cache_loc=torch.tensor(slots),
            seq_lens_sum=int(lengths.sum()), seq_lens_cpu=lengths,
        )  # fmt: skip
        if self.drafts:
            (count,) = set(counts)
            batch.forward_mode, batch.spec_info = self.sglang.ForwardMode.TARGET_VERIFY, drafts_of(count)
            batch.seq_lens = batch.seq_lens_cpu = lengths - count
        elif not decodes:
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


@torch.no_grad()  # as the engine: the pool divides keys and values in place
def test_caches_of_8_bits(sglang):
    """Prompts read what the cache holds, as later steps do. Scales are as SGLang's weight loader leaves them."""
    layer = sglang.RadixAttention(HEADS, DIM, 0.2, HEADS_KV, 0)
    layer.k_scale, layer.v_scale = torch.nn.Parameter(torch.tensor(0.5), False), torch.nn.Parameter(torch.ones(1) / 4)
    engine = Engine(sglang, dtype=torch.float8_e4m3fn)
    engine.backend.init_cuda_graph_state(4, 4)
    for new, captured in (({1: 40, 2: 7}, False), ({1: 1, 3: 33, 2: 9}, False), ({1: 1, 3: 1, 2: 1}, True)):
        for request, (out, q) in engine.step(layer, new, captured=captured).items():
            keys, values = (
                wa.quantize(x, scale=scale.detach().reshape(())).dequantized()
                for x, scale in zip(engine.texts[request], (layer.k_scale, layer.v_scale), strict=True)
            )
            expected = wa.attention(q[None], keys[None], values[None], mask=wa.Causal(), scale=0.2)[0]
            torch.testing.assert_close(out, expected)


def test_windows_with_a_cache_of_their_own(sglang):
    """Their cache has other slots for the same tokens, and none for old ones; other layers keep the first."""
    pool = sglang.SWAKVPool(
        CACHE, CACHE // 2, PAGE, torch.float32, HEADS_KV, DIM, [1], [0], "cpu", enable_alt_stream=False
    )
    mapping = torch.zeros(CACHE + PAGE + 1, dtype=torch.int64)
    pool.register_mapping(mapping)
    engine = Engine(sglang, token_to_kv_pool=pool)
    engine.backend.init_cuda_graph_state(4, 4)
    free = (torch.randperm(CACHE // 2 // PAGE - 1) + 1).tolist()
    full = sglang.RadixAttention(HEADS, DIM, 0.2, HEADS_KV, 0)
    window = sglang.RadixAttention(HEADS, DIM, 0.2, HEADS_KV, 1, sliding_window_size=19)
    engine.taken = lambda page: mapping[page * PAGE : (page + 1) * PAGE].copy_(torch.arange(PAGE) + free.pop() * PAGE)
    steps = ({1: 40, 2: 7}, {1: 1, 3: 33, 2: 9}, {1: 1, 3: 1, 2: 1}, {1: 1, 3: 1, 2: 1})
    texts: tuple[dict, dict] = ({}, {})
    for number, new in enumerate(steps):
        for layer, mask, own in zip((window, full), (wa.SlidingWindow(20), wa.Causal()), texts, strict=True):
            engine.texts = own
            check(engine, engine.step(layer, new, captured=number > 1), mask=mask, scale=0.2)
        if number == 1:
            mapping[engine.requests.req_to_token[1, :PAGE].long()] = 0  # out of every window's reach


class Latent(Engine):
    """An engine of a model with latent attention, in the form that SGLang's models choose."""

    def __init__(self, sglang) -> None:
        pool = sglang.MLATokenToKVPool(CACHE, PAGE, torch.float32, 24, 8, 1, "cpu", False, dcp_replicated=True)
        super().__init__(sglang, use_mla_backend=True, token_to_kv_pool=pool)
        self.up = torch.randn(24, HEADS, 2, 16)  # from a latent to a head's key and value

    def heads(self, latents):
        """Keys (tokens, heads, 16 + 8) and values (tokens, heads, 16) of latents (tokens, 24 + 8)."""
        k, v = torch.einsum("tl,lhkd->kthd", latents[:, :24], self.up)
        return torch.cat((k, latents[:, None, 24:].expand(-1, HEADS, -1)), -1), v


@pytest.mark.parametrize(("chunk", "parts"), [(64, True), (9, False)])
def test_latent_attention(sglang, drafting, chunk, parts):
    """Prompts with chunks of context, merged by their LSE; decoding and drafts over latents, eager and captured."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry, AttnForwardMethod

    engine = Latent(sglang)
    engine.backend.init_cuda_graph_state(4, 16)
    mha = sglang.RadixAttention(HEADS, 24, 0.2, HEADS, 0, v_head_dim=16)
    mqa = sglang.RadixAttention(HEADS, 32, 0.2, 1, 0, v_head_dim=24)
    form = AttentionBackendRegistry.get_handler("warpattn")
    texts: dict[int, torch.Tensor] = {}
    steps = (({1: 40, 2: 7}, False), ({1: 5, 2: 30, 3: 11}, False), ({1: 1, 2: 1}, False), ({3: 1, 1: 1}, True))
    for new, captured in (*steps, ({3: 4, 1: 4}, False), ({2: 4, 1: 4, 3: 4}, True)):
        counts = list(new.values())
        engine.drafts = set(counts) == {4}
        before = [texts.get(request, torch.empty(0, 32)) for request in new]
        fresh = torch.randn(sum(counts), 32)
        for request, *parts in zip(new, before, fresh.split(counts), strict=True):
            texts[request] = torch.cat(parts)
        starts = [len(x) for x in before]
        slots = [s for r, a, n in zip(new, starts, counts, strict=True) for s in engine.slots(r, a, a + n)]
        batch = engine.batch(list(new), starts, counts, slots)
        init = engine.backend.init_forward_metadata_out_graph if captured else engine.backend.init_forward_metadata
        init(batch)
        q = torch.randn(sum(counts), HEADS, 24)
        if form(None, batch) == AttnForwardMethod.MLA:
            nope, rope = torch.einsum("thd,lhd->thl", q[..., :16], engine.up[:, :, 0]), q[..., 16:]
            latents, rotary = fresh[:, None].split([24, 8], -1)
            if parts:
                named = {"q_rope": rope, "k_rope": rotary}
                found = engine.backend.forward(nope, latents, latents, mqa, batch, **named)
            else:
                absorbed = torch.cat((nope, rope), -1)
                found = engine.backend.forward(absorbed, fresh[:, None], fresh[:, None, :24], mqa, batch)
            found = torch.einsum("thl,lhd->thd", found.view(-1, HEADS, 24), engine.up[:, :, 1])
        else:
            assert form(None, batch) == AttnForwardMethod.MHA_CHUNKED_KV
            engine.pool.kv_buffer[0][batch.out_cache_loc] = fresh[:, None]
            found = prompts(engine, batch, mha, (q, *engine.heads(fresh)), before, chunk)
        for out, q_own, request in zip(found.split(counts), q.split(counts), new, strict=True):
            keys, values = engine.heads(texts[request])
            operands = [x[None] for x in (q_own, keys, values)]
            expected = wa.attention(*operands, mask=wa.Causal(), scale=0.2)[0]
            exact = wa.attention(*(x.double() for x in operands), mask=wa.Causal(), scale=0.2)[0]
            rounding = (expected - exact).abs().max().item()  # of fp32, in which both sides are computed
            torch.testing.assert_close(out.double(), exact, atol=1e-5 + rounding, rtol=1.3e-6)


def test_latents_of_requests_with_different_numbers_of_tokens(sglang):
    """Decode's form with one and with three new tokens, as many in all as if both had two."""
    engine, layer = Latent(sglang), sglang.RadixAttention(HEADS, 32, 0.2, 1, 0, v_head_dim=24)
    texts = dict.fromkeys((1, 2), torch.empty(0, 32))
    for counts in ((9, 4), (1, 3), (2, 2)):
        new = [torch.randn(n, 32) for n in counts]
        starts = [len(text) for text in texts.values()]
        slots = [s for r, a, n in zip(texts, starts, counts, strict=True) for s in engine.slots(r, a, a + n)]
        texts = {r: torch.cat((text, rows)) for (r, text), rows in zip(texts.items(), new, strict=True)}
        batch = engine.batch(list(texts), starts, list(counts), slots)
        engine.backend.init_forward_metadata(batch)
        q, (latents, rotary) = torch.randn(sum(counts), HEADS, 32), torch.cat(new)[:, None].split([24, 8], -1)
        named = {"q_rope": q[..., 24:], "k_rope": rotary}
        out = engine.backend.forward(q[..., :24], latents, latents, layer, batch, **named).view(-1, HEADS, 24)
        for found, query, text in zip(out.split(counts), q.split(counts), texts.values(), strict=True):
            keys = text[None, :, None]
            expected = wa.attention(query[None], keys, keys[..., :24], mask=wa.Causal(), scale=0.2)[0]
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("parts", [True, False])
def test_latents_of_8_bits(sglang, parts):
    """A step of decoding after tokens of a first one: keys are what the cache holds, without a scale."""
    pool = sglang.MLATokenToKVPool(CACHE, PAGE, torch.float8_e4m3fn, 16, 16, 1, "cpu", False, dcp_replicated=True)
    engine = Engine(sglang, use_mla_backend=True, token_to_kv_pool=pool)
    layer = sglang.RadixAttention(HEADS, 32, 0.2, 1, 0, v_head_dim=16)
    texts = dict.fromkeys((1, 2), torch.empty(0, 32))
    for start in range(20):
        fresh = torch.randn(2, 32)
        texts = {request: torch.cat((texts[request], fresh[n : n + 1])) for n, request in enumerate(texts)}
        slots = [engine.slots(request, start, start + 1)[0] for request in texts]
        batch = engine.batch(list(texts), [start] * 2, [1] * 2, slots)
        engine.backend.init_forward_metadata(batch)
        q, (latents, rotary) = torch.randn(2, HEADS, 32), fresh[:, None].split([16, 16], -1)
        if parts:
            named = {"q_rope": q[..., 16:], "k_rope": rotary}
            out = engine.backend.forward(q[..., :16], latents, latents, layer, batch, **named)
        else:
            out = engine.backend.forward(q, fresh[:, None], latents, layer, batch)
        for n, text in enumerate(texts.values()):
            keys = text.to(torch.float8_e4m3fn).float()[None, :, None]
            expected = wa.attention(q[n : n + 1, None], keys, keys[..., :16], scale=0.2)[0, 0]
            torch.testing.assert_close(out.view(2, HEADS, 16)[n], expected)


def prompts(engine, batch, layer, qkv, before, chunk):
    """What SGLang's models do with prompts: new tokens, then each chunk of context, merged."""
    q, *new = qkv
    batch.mha_return_lse = any(len(x) for x in before)
    batch.set_attn_attend_prefix_cache(False)
    found = engine.backend.forward(q, *new, layer, batch, save_kv_cache=False)
    if not batch.mha_return_lse:
        return found.view(len(q), HEADS, 16)
    parts = [found]
    batch.set_attn_attend_prefix_cache(True)
    starts = range(0, max(len(x) for x in before), chunk)
    sizes = torch.tensor([[len(x[start : start + chunk]) for x in before] for start in starts])
    batch.prefix_chunk_cu_seq_lens = torch.nn.functional.pad(sizes.cumsum(1), (1, 0)).int()
    batch.prefix_chunk_max_seq_lens = sizes.max(1).values.tolist()
    for number, start in enumerate(starts):
        batch.set_prefix_chunk_idx(number)
        context = torch.cat([x[start : start + chunk] for x in before])
        parts.append(engine.backend.forward(q, *engine.heads(context), layer, batch, save_kv_cache=False))
    out, lse = parts[0]
    for more, weight in parts[1:]:
        total = torch.logaddexp(lse, weight)
        out = out * (lse - total).exp()[..., None] + more * (weight - total).exp()[..., None]
        lse = total
    return out


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
        table = step.tables.pages
        places.add((table.data_ptr(), step.lengths.data_ptr(), step.cu_q.data_ptr(), table.shape))
    assert len(places) == 1
    assert engine.backend.get_cuda_graph_seq_len_fill_value() == 1


def test_what_it_has_not_is_one_sentence(sglang):
    engine = Engine(sglang)
    with pytest.raises(AttentionError, match="MHATokenToKVPool; it must be MLATokenToKVPool"):
        Engine(sglang, use_mla_backend=True)

    class Renamed(sglang.MHATokenToKVPool):
        """Such as a pool whose slots have names of their own."""

    for pool in (object(), Renamed.__new__(Renamed)):
        with pytest.raises(AttentionError, match=f"the cache is a {type(pool).__name__}; it must be MHATokenToKVPool"):
            Engine(sglang, token_to_kv_pool=pool)
    with pytest.raises(AttentionError, match=r"torch\.int8"):
        Engine(sglang, dtype=torch.int8)
    layer = sglang.RadixAttention(HEADS, DIM, 0.2, HEADS_KV, 0, is_cross_attention=True)
    with pytest.raises(AttentionError, match="cross-attention"):
        engine.step(layer, {1: 5})
    plain = sglang.RadixAttention(HEADS, DIM, 0.2, HEADS_KV, 0)
    with pytest.raises(AttentionError, match="q_rope"):
        engine.step(plain, {1: 5}, q_rope=torch.ones(1))


@pytest.mark.parametrize(
    ("dtype", "ranks", "words"),
    [
        (torch.int8, 1, "the cache holds torch.int8; it must hold float16, bfloat16, float8_e4m3fn, float8_e5m2"),
        (torch.bfloat16, 2, "2 ranks share the context"),
    ],
)
def test_latents_it_cannot_read(sglang, monkeypatch, dtype, ranks, words):
    from sglang.srt.mem_cache import memory_pool

    from warpattn.integrations.sglang.pools import Pool

    monkeypatch.setattr(memory_pool, "get_parallel", lambda: SimpleNamespace(attn_dcp_size=ranks))
    pool = sglang.MLATokenToKVPool(CACHE, PAGE, dtype, 24, 8, 1, "cpu", False)
    with pytest.raises(AttentionError, match=words):
        Pool.of(SimpleNamespace(use_mla_backend=True, token_to_kv_pool=pool, page_size=PAGE), False)


def test_models_whose_queries_are_scaled_by_position_join_them(sglang):
    """SGLang scales them only where it joins both parts."""
    from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS as IN_PARTS

    from warpattn.integrations.sglang import latent

    for config, parts in (({}, True), ({"llama_4_scaling": {"beta": 0.1}}, False), ({}, True)):
        latent.register(SimpleNamespace(model_config=SimpleNamespace(hf_config=SimpleNamespace(**config))))
        assert ("warpattn" in IN_PARTS) == parts
