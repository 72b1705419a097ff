"""Models with latent attention (MLA): one vector a token in the cache, [latent 512 | rotary 64].

    decode    queries (tokens, heads, 512) and (…, 64), pages   `attention_paged`, `LatentQuery`: values are latents
              pages of e4m3 (`fp8`), with one scale       `LatentPages`; also 656 bytes a token (`fp8_ds_mla`)
    prompts   q and k (tokens, heads, 192), v (…, 128)          `attention_varlen`: new tokens, then chunks of context

vLLM's own classes project between the two forms, gather context, and merge parts by their LSE.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm.envs as envs
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, MultipleOf
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from warpattn.api import attention_paged, attention_varlen
from warpattn.errors import AttentionError, Rules
from warpattn.integrations.step_plans import LayerModifiers, ScoreOptions, StepPlans
from warpattn.integrations.vllm.backend import largest_head
from warpattn.integrations.vllm.layer import SIXTEEN_BIT
from warpattn.integrations.vllm.metadata import on_hopper
from warpattn.masks import Causal, Full
from warpattn.sequences import PagedKV, Ragged
from warpattn.sequences.latent import TOKEN_BYTES, LatentPages, latent_parts
from warpattn.sequences.latent_query import of_parts
from warpattn.serving import PrefillPlan, append_slots

NAME = "WARPATTN_MLA"
LATENT, PROMPT = 576, 192  # head dims of queries
EIGHT_BIT = ("fp8", "fp8_e4m3")  # latents and rotary parts of e4m3, with the layer's scale of keys
DEEPSEEK = "fp8_ds_mla"  # a token's latent of 8 bits, its scales and its rotary part, in bytes
DECODED = 16  # most new tokens of a request, drafts included, that decoding takes
LAYER = ("num_heads", "scale", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "vllm_config")
NONE_OF = ("alibi_slopes", "sliding_window", "logits_soft_cap", "indexer")


class WarpattnMLABackend(MLACommonBackend):
    """The class that vLLM asks what the backend supports."""

    supported_dtypes = [torch.float16, torch.bfloat16]  # noqa: RUF012 - the base class declares it so
    supported_kv_cache_dtypes = [*SIXTEEN_BIT, *EIGHT_BIT, DEEPSEEK]  # noqa: RUF012 - the base class declares it so

    @staticmethod
    def get_name() -> str:
        return NAME if NAME in AttentionBackendEnum.__members__ else "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[WarpattnMLAImpl]:
        return WarpattnMLAImpl

    @staticmethod
    def get_builder_cls() -> type[WarpattnMLABuilder]:
        return WarpattnMLABuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """(pages, tokens of a page, columns or bytes of a token); vLLM 0.32 and later know it themselves."""
        return num_blocks, block_size, TOKEN_BYTES if cache_dtype_str == DEEPSEEK else head_size

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [LATENT]

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """On Hopper only, as `WarpattnBackend`."""
        return on_hopper()

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return (largest_head(capability) or 0) >= PROMPT


class WarpattnMLABuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """vLLM's builder, with our attention for prompts."""

    query_len_support = QueryLenSupport.UNIFORM

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """On Hopper, graphs capture decoding; prompts need lengths on the host."""
        return AttentionCGSupport.UNIFORM_BATCH if on_hopper() else AttentionCGSupport.NEVER

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._prefill_backend = WarpattnMLAPrefill.in_place_of(self._prefill_backend)
        self._plans = StepPlans(DECODED, batch_invariant=True) if envs.VLLM_BATCH_INVARIANT else None

    @staticmethod
    def determine_prefill_query_data_type(vllm_config: Any, model_dtype: torch.dtype) -> torch.dtype:
        """Return the model's dtype: vLLM would ask its own prefill backend, which ours replaces, about 8 bits."""
        return model_dtype

    def build(self, *arguments: Any, **named: Any) -> MLACommonMetadata:
        """Return vLLM's metadata, with our decoding plans if a token's bits must not depend on the batch."""
        metadata = super().build(*arguments, **named)
        vars(metadata)["plans"] = self._plans
        return metadata


class WarpattnMLAPrefill(MLAPrefillBackend):
    """Attends prompts with expanded heads; results are as vLLM merges them: LSE (heads, tokens), natural."""

    @classmethod
    def in_place_of(cls, theirs: Any) -> WarpattnMLAPrefill:
        """Make one for the same layers as vLLM's prefill backend."""
        return cls(**{name: getattr(theirs, name) for name in LAYER})

    @staticmethod
    def get_name() -> str:
        return NAME

    def run_prefill_new_tokens(
        self, q: Tensor, k: Tensor, v: Tensor, return_softmax_lse: bool, out: Any = None, output_scale: Any = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend the new tokens to themselves."""
        if output_scale is not None:
            rule = "warpattn's vLLM backend writes outputs in the dtype of the queries"
            raise AttentionError(f"output_scale is given; {rule}")
        step = self._prefill_metadata
        seq = Ragged(step.query_start_loc, max_q=step.max_query_len, max_k=step.max_query_len)
        return self._attend(q, k, v, seq, mask=Causal(), return_lse=return_softmax_lse)

    def run_prefill_context_chunk(
        self, chunk: Any = None, q: Any = None, k: Any = None, v: Any = None, out: Any = None, chunk_idx: int = 0
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend the new tokens to a chunk of their context, which vLLM 0.26 passes by its number."""
        if chunk is None:
            step, context = self._prefill_metadata, self._prefill_metadata.chunked_context
            most = {"max_q": step.max_query_len, "max_k": context.max_seq_lens[chunk_idx]}
            seq = Ragged(step.query_start_loc, context.cu_seq_lens[chunk_idx], **most)
        else:
            most = {"max_q": chunk.max_query_len, "max_k": chunk.max_seq_len}
            seq = Ragged(chunk.query_start_loc, chunk.cu_seq_lens, **most)
        return self._attend(q, k, v, seq, mask=Full(), return_lse=True)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, seq: Ragged, **tail: Any) -> Tensor | tuple[Tensor, Tensor]:
        """Attend prompts; makes a plan each time if their bits must not depend on the batch."""
        if envs.VLLM_BATCH_INVARIANT:
            return PrefillPlan(q, k, v, seq, scale=self.scale, batch_invariant=True, **tail)(q, k, v, seq)
        return attention_varlen(q, k, v, seq, scale=self.scale, **tail)


class WarpattnMLAImpl(MLACommonImpl[MLACommonMetadata]):
    """One layer's attention; with context that ranks share (DCP), vLLM merges their parts by the LSE."""

    can_return_lse_for_decode = True
    supports_dcp = True
    supports_pcp = False

    def __init__(self, **named: Any) -> None:
        rules = Rules()
        for name in NONE_OF:
            what = f"{name} is an option of this model"
            rules.require(named.get(name) is None, what, "warpattn's latent attention in vLLM has none")
        kind = named.get("kv_cache_dtype", "auto")
        rule = f"warpattn's latent attention in vLLM has {', '.join(WarpattnMLABackend.supported_kv_cache_dtypes)}"
        rules.require(kind in WarpattnMLABackend.supported_kv_cache_dtypes, f"kv_cache_dtype is {kind!r}", rule)
        what = f"VLLM_BATCH_INVARIANT is set and {self.dcp_world_size} ranks share the context"
        rule = "warpattn's latent attention has no batch invariance there: unset one of the two"
        rules.require(not envs.VLLM_BATCH_INVARIANT or self.dcp_world_size <= 1, what, rule)
        rules.done()
        super().__init__(**named)
        self.supports_quant_query_input = False
        self.reads_bytes, self.narrow = kind == DEEPSEEK, kind in EIGHT_BIT

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Return False: vLLM then quantises outputs itself, without asking its prefill backend, which ours replaces."""
        return False

    def do_kv_cache_update(
        self, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_cache_dtype: str,
        k_scale: Tensor, *others: Any, **named: Any,
    ) -> None:  # fmt: skip
        """Write new latents (tokens, 512) and rotary keys (tokens, 1, 64) into their slots; slot -1 is padding."""
        if kv_cache.numel() == 0:
            return
        new, slots, pages = kv_c_normed.unsqueeze(1), slot_mapping.flatten(), kv_cache.unsqueeze(2)
        if self.reads_bytes:
            parts = latent_parts(pages)
            append_slots(new, None, parts.latents, None, slots, k_scale=parts.scale)
            append_slots(k_pe, None, parts.rope, None, slots)
        else:
            pages = pages.view(torch.float8_e4m3fn) if self.narrow else pages
            latents, rotary = pages.split([new.shape[-1], k_pe.shape[-1]], dim=-1)
            scales = [k_scale.reshape(()) if self.narrow else None for _ in range(2)]
            append_slots(new, k_pe, latents, rotary, slots, k_scale=scales[0], v_scale=scales[1])

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return out (tokens, heads, 512), and the LSE (tokens, heads) if ranks share the context."""
        step, keys = attn_metadata.decode, kv_c_and_k_pe_cache.unsqueeze(2)
        if self.reads_bytes:
            kv = LatentPages.of_bytes(keys, step.block_table, step.seq_lens)
        elif self.narrow:
            keys, size = keys.view(torch.float8_e4m3fn), self.kv_lora_rank
            tables, scale = (step.block_table, step.seq_lens), layer._k_scale.reshape(())
            kv = LatentPages(keys[..., :size], keys[..., size:], *tables, scale=scale)
        else:
            kv = PagedKV(keys, keys[..., : self.kv_lora_rank], step.block_table, step.seq_lens)
        parts, shared = q if isinstance(q, tuple) else (q,), self.dcp_world_size > 1
        plans: StepPlans | None = getattr(attn_metadata, "plans", None)
        if plans is not None:
            return self._planned(plans, parts, kv), None
        rows = [x.unflatten(0, (len(step.seq_lens), -1)) for x in parts]
        found = attention_paged(of_parts(*rows), kv, mask=Causal(), scale=self.scale, return_lse=shared)
        out, lse = found if isinstance(found, tuple) else (found, None)
        return out.flatten(0, 1), None if lse is None else lse.transpose(1, 2).flatten(0, 1)

    def _planned(self, plans: StepPlans, parts: tuple[Tensor, ...], kv: PagedKV) -> Tensor:
        """Return out (tokens, heads, 512) of requests with equally many new tokens, with batch-invariant bits."""
        total = len(parts[0])
        each = total // max(len(kv.lengths), 1)
        starts = torch.arange(0, total + 1, max(each, 1), dtype=torch.int32, device=kv.lengths.device)
        out = parts[0].new_empty((*parts[0].shape[:-1], self.kv_lora_rank))
        layer = LayerModifiers(Causal(), ScoreOptions(None, None), self.scale)
        plans.attend(layer, of_parts(*parts), kv, Ragged(starts, max_q=each), out, None)
        return out
