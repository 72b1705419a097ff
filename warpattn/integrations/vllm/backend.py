"""Tells vLLM what the backend supports, before vLLM makes one."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from warpattn.integrations.vllm.impl import WarpattnImpl
from warpattn.integrations.vllm.layer import CACHE_DTYPES, EIGHT_BIT, ENCODERS
from warpattn.integrations.vllm.metadata import WarpattnMetadataBuilder, on_hopper

# What `attention` has kernels for, by capability as vLLM reports it, and their largest head dim.
CUDA = {(9, 0): 512, (10, 0): 512, (10, 3): 512}
EIGHT_BIT_LARGEST = 256  # of an 8-bit cache
ROCM = {(9, 4): 256, (9, 5): 256}  # gfx942, gfx950; (9, 0) is gfx90a there
NAME = "WARPATTN"
HEAD_BY_HEAD, ROW_BY_ROW = (0, 1, 2, 3), (0, 2, 1, 3)  # axes of (pages, heads, page size, keys and values)


class WarpattnBackend(AttentionBackend):
    """The class that vLLM asks what the backend supports."""

    supported_dtypes = [torch.float16, torch.bfloat16]  # noqa: RUF012 - the base class declares it so
    supported_kv_cache_dtypes = CACHE_DTYPES
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """WARPATTN, or CUSTOM if vLLM takes no new names: vLLM looks the name up in its enumeration."""
        return NAME if NAME in AttentionBackendEnum.__members__ else "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[WarpattnImpl]:
        return WarpattnImpl

    @staticmethod
    def get_builder_cls() -> type[WarpattnMetadataBuilder]:
        return WarpattnMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Keys and values of a row side by side (vLLM before 0.30 asks)."""
        return (num_blocks, num_kv_heads, block_size, 2 * head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """The order of the shape's axes in memory, by vLLM's setting (vLLM before 0.30 asks): usually all heads of a
        row together, which decode reads 2 % faster than all rows of a head (bench/notes.md 172)."""
        if include_num_layers_dimension:
            raise NotImplementedError  # a cache for each layer
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        return HEAD_BY_HEAD if get_kv_cache_layout() == "HND" else ROW_BY_ROW

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= 512

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True  # but see `supports_combination`

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """On Hopper only: elsewhere decode and prefill kernels sum in different orders."""
        return on_hopper()

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # the host's lengths say whether prompts have context

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, *ENCODERS)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return largest_head(capability) is not None

    @classmethod
    def supports_combination(cls, head_size: int, *others: Any) -> str | None:
        """Return why a card cannot have a head dim; vLLM passes nine arguments, the last is the card's capability."""
        largest = largest_head(others[-1])
        hopper = not torch.version.hip and (others[-1].major, others[-1].minor) == (9, 0)
        if any(other in EIGHT_BIT for other in others[:2]):
            if not hopper:
                return "an 8-bit cache on this card"
            if head_size % 16:
                return "an 8-bit cache with a head_size that is no multiple of 16"
            if head_size > EIGHT_BIT_LARGEST:
                return f"an 8-bit cache with a head_size above {EIGHT_BIT_LARGEST}"
        if largest is None or head_size <= largest:
            return None
        return f"head_size above {largest} on this card"


def largest_head(capability: Any) -> int | None:
    """Return the largest head dim of a card's kernels; None if it has no kernels."""
    return (ROCM if torch.version.hip else CUDA).get((capability.major, capability.minor))
