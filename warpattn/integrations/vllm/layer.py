"""A layer's options as vLLM gives them, and the mask and score made from them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionType

from warpattn.errors import AttentionError
from warpattn.masks import Causal, Full, Mask, SlidingWindow

EIGHT_BIT = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
SIXTEEN_BIT = ["auto", "float16", "bfloat16"]
CACHE_DTYPES = [*SIXTEEN_BIT, *EIGHT_BIT]
ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


class LayerOptions(NamedTuple):
    """The arguments that vLLM gives for a layer, in its order."""

    num_heads: int
    head_size: int
    scale: float
    num_kv_heads: int | None = None
    alibi_slopes: list[float] | None = None
    sliding_window: int | None = None
    kv_cache_dtype: str = "auto"
    logits_soft_cap: float | None = None
    attn_type: str = AttentionType.DECODER
    kv_sharing_target_layer_name: str | None = None
    sinks: Tensor | None = None


def check_options(options: LayerOptions) -> None:
    """Raise AttentionError for a layer that the backend does not support."""
    if options.kv_cache_dtype not in CACHE_DTYPES:
        listed = ", ".join(CACHE_DTYPES)
        raise AttentionError(f"kv_cache_dtype is {options.kv_cache_dtype!r}; it must be one of {listed}")
    if options.attn_type not in (AttentionType.DECODER, *ENCODERS):
        raise AttentionError(f"attn_type is {options.attn_type!r}; warpattn's vLLM backend has decoders and encoders")


def layer_mask(options: LayerOptions, causal: bool = True) -> Mask:
    """Return the layer's mask; it sees both directions in encoders and steps that are not `causal`."""
    window = options.sliding_window
    if options.attn_type in ENCODERS or not causal:
        return Full() if window is None else SlidingWindow(window, right=window - 1)
    return Causal() if window is None else SlidingWindow(window)
