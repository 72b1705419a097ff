"""vLLM's engine on the CPU with a small DeepSeek 2 and our latent attention: chunks, shared prefixes, drafts, ranks.

A process of its own: an engine with drafts of n-grams changes later ones in its process (vLLM 0.32, with its
own attention, too).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import warpattn as wa
from tests.engine.test_vllm import N_GRAMS, check, engine, generate, on_cpus, prompts
from tests.families import decoder

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", autouse=True)
def _vllm():
    on_cpus("CPU_MLA", "latent.WarpattnMLABackend")


@pytest.fixture
def latent_steps(monkeypatch):
    """Calls of our latent attention: "new", "context" or "decode".

    vLLM turns chunks and shared prefixes off where the CPU has no AMX, for its own kernels; while it decides, this one
    has it. Its rotation on CPUs is wrong for columns of a larger tensor, as latent queries are (log-probabilities are
    off by up to 1e-2, with its own attention, too): its other one is taken.
    """
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
    from vllm.platforms.cpu import CpuPlatform

    from warpattn.integrations.vllm.latent import WarpattnMLAImpl, WarpattnMLAPrefill

    decide, seen = CpuPlatform.check_and_update_config, []

    def with_amx(config):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
            decide(config)

    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", RotaryEmbedding.forward_native)
    monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(with_amx))
    places = {"new": (WarpattnMLAPrefill, "run_prefill_new_tokens"), "decode": (WarpattnMLAImpl, "forward_mqa")}
    for what, (owner, name) in (places | {"context": (WarpattnMLAPrefill, "run_prefill_context_chunk")}).items():
        monkeypatch.setattr(owner, name, noting(seen, what, getattr(owner, name)))
    return seen


def noting(seen: list[str], what: str, function: Any) -> Any:
    """The function, which notes its calls."""

    def noted(*arguments: Any, **named: Any) -> Any:
        seen.append(what)
        return function(*arguments, **named)

    return noted


def over_ranks(forward: Any, ranks: int) -> Any:
    """`forward_mqa` as each of so many ranks that share a context calls it, its results merged by vLLM's functions.

    vLLM gives a rank every so manieth token and the number of these. Its merging for CPUs is torch's, and not called by
    its engine there, whose own is a kernel for cards; what ranks send each other stays in this process.
    """
    from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens
    from vllm.v1.attention.ops.dcp import _lse_weighted_combine, mask_dcp_empty_shards_

    def forward_mqa(self: Any, q: Any, cache: Tensor, metadata: Any, layer: Any) -> tuple[Tensor, None]:
        step, found = metadata.decode, []
        starts = torch.arange(len(step.seq_lens) + 1, dtype=torch.int32)
        for rank in range(ranks):
            lengths = get_dcp_local_seq_lens(step.seq_lens, ranks, rank)
            own = SimpleNamespace(block_table=own_table(step.block_table), seq_lens=lengths)
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(self, "dcp_world_size", ranks)
                share = cache_of_rank(cache, step, (rank, ranks))
                out, lse = forward(self, q, share, SimpleNamespace(decode=own), layer)
            masked = lse.clone()
            mask_dcp_empty_shards_(masked, lengths, starts)
            assert torch.equal(masked, lse)  # -inf where a rank has no token, without being told
            found.append((out, lse))
        return _lse_weighted_combine(*map(torch.stack, zip(*found, strict=True))), None

    return forward_mqa


def own_table(table: Tensor) -> Tensor:
    """A table of as many pages, in order."""
    return torch.arange(table.numel(), dtype=torch.int32).view(table.shape)


def cache_of_rank(cache: Tensor, step: Any, rank: tuple[int, int]) -> Tensor:
    """The requests' tokens of one rank of so many, in the pages of `own_table`; NaN where it has none."""
    requests, pages = step.block_table.shape
    own = torch.full((requests, pages * cache.shape[1], cache.shape[2]), torch.nan)
    for room, table, length in zip(own, step.block_table.long(), step.seq_lens.tolist(), strict=True):
        tokens = cache[table].flatten(0, 1)[:length][rank[0] :: rank[1]]
        room[: len(tokens)] = tokens
    return own.view(-1, *cache.shape[1:])


@pytest.mark.parametrize("ranks", [2, 3])
def test_context_that_ranks_share(ranks, latent_steps, monkeypatch, tmp_path):
    from warpattn.integrations.vllm.latent import WarpattnMLAImpl

    monkeypatch.setattr(WarpattnMLAImpl, "forward_mqa", over_ranks(WarpattnMLAImpl.forward_mqa, ranks))
    model, texts = decoder("deepseek_v2"), prompts()
    with engine(model, tmp_path) as llm:
        check(model, texts, generate(llm, texts))
    assert latent_steps.count("decode") >= ranks * model.config.num_hidden_layers


def test_batch_invariance(latent_steps, monkeypatch, tmp_path):
    """What a card's engine calls with VLLM_BATCH_INVARIANT: plans, for decoding and for prompts."""
    from warpattn.integrations.vllm import latent

    monkeypatch.setattr(latent, "envs", SimpleNamespace(VLLM_BATCH_INVARIANT=True))
    plan, planned = latent.StepPlans.attend, []
    monkeypatch.setattr(latent.StepPlans, "attend", noting(planned, "step", plan))
    monkeypatch.setattr(latent, "PrefillPlan", noting(planned, "prompts", latent.PrefillPlan))
    model, texts = decoder("deepseek_v2"), prompts()
    with engine(model, tmp_path) as llm:
        check(model, texts, generate(llm, texts))
        check(model, texts, generate(llm, texts))
    assert set(latent_steps) == {"new", "context", "decode"}
    assert planned.count("step") == latent_steps.count("decode")
    assert planned.count("prompts") == len(latent_steps) - latent_steps.count("decode")


def test_batch_invariance_of_ranks_is_refused_before_anything_runs(monkeypatch):
    """vLLM tells a layer of its ranks before `__init__`."""
    from vllm.distributed import parallel_state

    from warpattn.errors import AttentionError
    from warpattn.integrations.vllm import latent

    monkeypatch.setattr(latent, "envs", SimpleNamespace(VLLM_BATCH_INVARIANT=True))
    monkeypatch.setattr(parallel_state, "get_dcp_world_size_and_rank", lambda *_: (2, 0))
    with pytest.raises(AttentionError, match="VLLM_BATCH_INVARIANT is set and 2 ranks share the context"):
        latent.WarpattnMLAImpl()


def test_queries_and_outputs_are_not_rounded_by_what_another_backend_can(monkeypatch):
    """vLLM's classes would round both, where a card's own backend of prompts takes them."""
    from vllm.model_executor.layers.attention import mla_attention

    from warpattn.integrations.vllm import latent

    monkeypatch.setattr(mla_attention, "backend_supports_prefill_query_quantization", lambda: True)
    asked = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="fp8"),
        attention_config=SimpleNamespace(use_prefill_query_quantization=True),
    )
    kinds = [
        made.determine_prefill_query_data_type(asked, torch.bfloat16)
        for made in (latent.MLACommonMetadataBuilder, latent.WarpattnMLABuilder)
    ]
    assert kinds == [torch.float8_e4m3fn, torch.bfloat16]
    key, layers = mla_attention.kFp8StaticTensorSym, (latent.MLACommonImpl, latent.WarpattnMLAImpl)
    assert [made.fused_output_quant_supported(None, key) for made in layers] == [True, False]


def rounded(rows: Tensor, kind: str) -> Tensor:
    """Latents with rotary parts (tokens, 576) as a cache of 8 bits holds them."""
    latents, rotary = rows.split([512, 64], -1)
    if kind == "fp8":
        return wa.quantize(rows[:, None], scale=torch.ones(())).dequantized()[:, 0]
    return torch.cat((wa.quantize(latents[:, None], per=128).dequantized()[:, 0], rotary.bfloat16().float()), -1)


@pytest.mark.parametrize(("kind", "dtype"), [("fp8", "float32"), ("fp8_ds_mla", "bfloat16")])
def test_caches_of_8_bits(kind, dtype, monkeypatch, tmp_path):
    """What the engine hands over of a cache: decoding of every layer is attention over what was written, rounded.

    Prompts are whole: vLLM cannot read such a cache again on CPUs.
    """
    from vllm.platforms.cpu import CpuPlatform

    from warpattn.integrations.vllm.latent import WarpattnMLAImpl

    try:  # vLLM's own refusal, before an engine that fails to start breaks later ones
        CpuPlatform.get_attn_backend_cls(None, SimpleNamespace(use_sparse=False, use_mla=True, kv_cache_dtype=kind))
    except ValueError as error:
        pytest.skip(f"vLLM refuses: {error}")
    write, attend = WarpattnMLAImpl.do_kv_cache_update, WarpattnMLAImpl.forward_mqa
    written: dict[tuple[int, int], Tensor] = {}
    steps: list[int] = []

    def do_kv_cache_update(self, latents, rotary, cache, slots, *others):
        write(self, latents, rotary, cache, slots, *others)
        rows = rounded(torch.cat((latents, rotary[:, 0]), -1).float(), kind)
        written.update({(cache.data_ptr(), slot): row for slot, row in zip(slots.tolist(), rows, strict=False)})

    def forward_mqa(self, q, cache, metadata, layer):
        out, lse = attend(self, q, cache, metadata, layer)
        step, size = metadata.decode, cache.shape[1]
        for one, query, table, length in zip(out, torch.cat(q, -1), step.block_table, step.seq_lens, strict=True):
            places = [int(table[t // size]) * size + t % size for t in range(length)]
            keys = torch.stack([written[cache.data_ptr(), place] for place in places])[None, :, None]
            expected = wa.attention(query[None, None].float(), keys, keys[..., :512], scale=self.scale)[0, 0]
            torch.testing.assert_close(one, expected.to(one.dtype))
        steps.append(len(out))
        return out, lse

    monkeypatch.setattr(WarpattnMLAImpl, "do_kv_cache_update", do_kv_cache_update)
    monkeypatch.setattr(WarpattnMLAImpl, "forward_mqa", forward_mqa)
    with engine(decoder("deepseek_v2"), tmp_path, kv_cache_dtype=kind, dtype=dtype) as llm:
        generate(llm, [text[:20] for text in prompts()])
    assert len(steps) > 4 and max(steps) > 1


@pytest.mark.parametrize("drafts", [None, N_GRAMS])
def test_latent_attention(drafts, latent_steps, tmp_path):
    """The last of this file: n-grams change later engines."""
    model = decoder("deepseek_v2")
    texts = [text[:12] * 4 for text in prompts()] if drafts else prompts()
    with engine(model, tmp_path, speculative_config=drafts) as llm:
        check(model, texts, generate(llm, texts))
        again = generate(llm, texts)
        check(model, texts, again)
    assert set(latent_steps) == {"new", "context", "decode"}
    assert any(result.num_cached_tokens for result in again)
