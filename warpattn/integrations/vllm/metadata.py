"""A step of the engine, the same for all layers of a group, and its builder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import vllm.envs as envs
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder

from warpattn.errors import AttentionError
from warpattn.integrations.step_plans import StepPlans
from warpattn.integrations.vllm.images import ImageRanges, ranges_of

FROM_TEXT = ("ngram", "ngram_gpu", "suffix", "custom_class")  # methods of drafts without attention


@dataclass
class WarpattnMetadata(AttentionMetadata):
    """One step of the engine; its tensors are vLLM's, whose addresses stay the same from step to step."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor  # int32 [requests + 1]
    seq_lens: Tensor  # int32 [requests], context and new tokens
    block_table: Tensor  # int32 [requests, pages]
    slot_mapping: Tensor  # int64 [tokens]
    plans: StepPlans
    fresh: bool  # no request has context: k and v are all keys and values
    causal: bool
    lists: object = None  # layers with the same one share a plan's lists, see `StepPlan`; None: each makes its own
    # vLLM's names (0.32, 0.26): its Gemma 4 takes the ranges from layers without a window by setting them to None.
    mm_prefix_query_range_tensor: ImageRanges | None = None
    mm_prefix_range_tensor: ImageRanges | None = None

    @property
    def images(self) -> ImageRanges | None:
        """The ranges of tokens that see each other; None if no new token is in one."""
        return self.mm_prefix_range_tensor and self.mm_prefix_query_range_tensor


def on_hopper() -> bool:
    """Whether the current device is a Hopper card, the only kind that graphs and batch invariance were run on."""
    return torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() == (9, 0)


class WarpattnMetadataBuilder(AttentionMetadataBuilder[WarpattnMetadata]):
    """Makes a step's metadata from vLLM's, without reading or allocating anything on the card."""

    reorder_batch_threshold = 1  # single-token requests come first
    supports_update_block_table = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)
        self.compilation = getattr(vllm_config, "compilation_config", None)
        self.plans = StepPlans(1 + drafted_tokens(vllm_config), batch_invariant=self.batch_invariant)
        # A model that drafts may change lengths in place between passes over its layers, so these share no lists.
        self.one_pass = not drafts_by_model(vllm_config)
        self._images: ImageRanges | None = None

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """On Hopper launches do not depend on lengths, so graphs capture any step, except those with images, which have
        another mask."""
        if not on_hopper():
            return AttentionCGSupport.NEVER
        model = getattr(vllm_config, "model_config", None)
        images = getattr(model, "is_mm_prefix_lm", False)
        return AttentionCGSupport.UNIFORM_BATCH if images else AttentionCGSupport.ALWAYS

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> WarpattnMetadata:
        """Make a step's metadata. A common prefix is not used: every request reads its own pages."""
        common = common_attn_metadata
        if isinstance(common.causal, Tensor):
            raise AttentionError(
                "causal is a tensor; warpattn's vLLM backend takes batches that are all causal or none"
            )
        images = self._images_of(common)
        return WarpattnMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            plans=self.plans,
            fresh=not self.batch_invariant and is_fresh(common),
            causal=bool(common.causal),
            lists=object() if self.one_pass else None,
            mm_prefix_query_range_tensor=images,
            mm_prefix_range_tensor=images,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> WarpattnMetadata:
        """Make metadata for a graph, which must serve steps with context, too. Where decoding has graphs of its own,
        their requests have as many tokens as here; all other graphs serve prompts of any of their tokens, also those
        that are captured with one token a request (vLLM's second runner)."""
        step = self.build(0, common_attn_metadata)
        mode = getattr(self.compilation, "cudagraph_mode", None)
        decodes = mode is not None and mode.separate_routine() and step.max_query_len <= self.plans.decoded
        longest = step.max_query_len if decodes else step.num_actual_tokens
        return replace(step, fresh=False, max_query_len=longest)

    def _images_of(self, common: Any) -> ImageRanges | None:
        """Return the ranges of a batch, None if no new token is in one."""
        starts, found = ranges_of(common)
        if not found:
            return None
        sizes = common.num_actual_tokens, common.num_reqs
        if self._images is None or not self._images.holds(*sizes):
            self._images = ImageRanges(*sizes, common.query_start_loc.device)
        self._images.write(starts, found)
        return self._images

    def update_block_table(self, metadata: WarpattnMetadata, blk_table: Tensor, slot_mapping: Tensor) -> Any:
        """Return the same step over the pages of another group of layers."""
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)


def drafted_tokens(vllm_config: Any) -> int:
    """Return the most speculative tokens of a request, 0 without speculation."""
    speculation = getattr(vllm_config, "speculative_config", None)
    return getattr(speculation, "num_speculative_tokens", None) or 0


def drafts_by_model(vllm_config: Any) -> bool:
    """Return whether a model with attention of its own may draft tokens."""
    speculation = getattr(vllm_config, "speculative_config", None)
    return speculation is not None and getattr(speculation, "method", None) not in FROM_TEXT


def is_fresh(common: Any) -> bool:
    """Whether no request of a batch has context, by the host's copies of offsets and of bounds of lengths."""
    bounds = getattr(common, "seq_lens_cpu_upper_bound", None)
    if bounds is None or common.max_query_len <= 1 or common.max_query_len < common.max_seq_len:
        return False
    starts = common.query_start_loc_cpu[: common.num_reqs + 1]
    return torch.equal(starts.diff(), bounds[: common.num_reqs].to(starts.dtype))
