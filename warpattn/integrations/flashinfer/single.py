"""One request: `single_decode_with_kv_cache`, `single_prefill_with_kv_cache`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from warpattn.api import attention
from warpattn.errors import AttentionError
from warpattn.inputs import kind_of
from warpattn.integrations.flashinfer.layer import (
    BLOCK_SCALES,
    Layer,
    all_of,
    check_output,
    factor_of,
    finished,
    heads_last,
    of_layout,
    with_scales,
)
from warpattn.integrations.flashinfer.masks import packed_mask
from warpattn.integrations.signature import Given, drop_in
from warpattn.masks import Materialized
from warpattn.quantized import EIGHT_BIT

FACTORS = {"scale_q": "q", "scale_k": "k", "scale_v": "v"}  # of tensors of 8 bits


@drop_in(
    "q: 2, k: 3, v: 3, kv_layout='NHD', pos_encoding_mode='NONE', use_tensor_cores=False, q_scale=None, k_scale=None, "
    "v_scale=None, window_left: whole=-1, logits_soft_cap: number=None, sm_scale: number=None, rope_scale=None, "
    "rope_theta=None, "
    "return_lse=False",
    hints={"use_tensor_cores", "rope_scale", "rope_theta"},
)
def single_decode_with_kv_cache(given: Given) -> Any:
    """q (Hq, D), k and v (keys, Hkv, D), or (Hkv, keys, D) as "HND"; out (Hq, D), with return_lse also lse (Hq,)."""
    layer, tensors = all_of(lambda: _layer(given, causal=True), lambda: _scaled(given, given.q[None]))
    out, lse = attention(*tensors, **layer.tail())
    result = finished(given, out[0], lse[0], given.v)
    return (result[0][0], result[1][0]) if isinstance(result, tuple) else result[0]


@drop_in(
    "q: 3, k: 3, v: 3, scale_q=None, scale_k=None, scale_v=None, o_dtype=None, custom_mask: 2=None, "
    "packed_custom_mask: 1=None, causal=False, kv_layout='NHD', pos_encoding_mode='NONE', use_fp16_qk_reduction=False, "
    "sm_scale: number=None, window_left: whole=-1, logits_soft_cap: number=None, rope_scale=None, rope_theta=None, "
    "backend='auto', return_lse=False, kv_cache_sf=None, k_scale=None, v_scale=None",
    refused={"kv_cache_sf": BLOCK_SCALES},
    hints={"backend", "rope_scale", "rope_theta", "use_fp16_qk_reduction"},
)
def single_prefill_with_kv_cache(given: Given) -> Any:
    """q (queries, Hq, D), k and v as for decode; out (queries, Hq, Dv), with return_lse also lse (queries, Hq). A
    `custom_mask` (queries, keys), True where a key is visible, or its bits replace `causal`; queries sit at the last
    keys."""
    q, given = given.q, _with_mask(_named(given))
    layer, tensors, _ = all_of(
        lambda: _layer(given, given.causal and given.custom_mask is None),
        lambda: _scaled(given, q),
        lambda: check_output("o_dtype", given.o_dtype, q),
    )
    if given.custom_mask is not None:
        layer = layer._replace(mask=layer.mask & Materialized(given.custom_mask.bool()[None]))
    out, lse = attention(*tensors, **layer.tail())
    return finished(given, out[0], lse[0], given.v)


def _layer(given: Given, causal: bool) -> Layer:
    dim, k, v = given.q.shape[-1], given.k, given.v
    layer, factor = all_of(lambda: Layer.of(given, dim, causal), lambda: factor_of(given, k, v))
    return layer._replace(scale=layer.scale * factor)


def _scaled(given: Given, q: Tensor) -> list[Any]:
    """Return q (queries, Hq, D) and the call's k and v as a batch of one request, with their scales."""
    layout = of_layout(given.kv_layout)
    return with_scales(given, q[None], *(heads_last(x, layout)[None] for x in (given.k, given.v)))


def _with_mask(given: Given) -> Given:
    """Return the arguments with packed_custom_mask unpacked to `custom_mask`, which it replaces."""
    if given.packed_custom_mask is None:
        return given
    queries, keys = len(given.q), heads_last(given.k, of_layout(given.kv_layout)).shape[0]
    cu_q, lengths = (torch.tensor(x, device="cpu") for x in ([0, queries], [keys]))
    bits = packed_mask(given.packed_custom_mask, cu_q, lengths, given.q.device).seen
    return Given(vars(given) | {"custom_mask": bits[: queries * keys].view(queries, keys)})


def _named(given: Given) -> Given:
    """Return the arguments with factors of 8-bit tensors renamed to the names in other calls."""
    changed: dict[str, Any] = {"q_scale": given.scale_q}
    for name, of in FACTORS.items():
        factor, other, dtype = getattr(given, name), f"{of}_scale", getattr(given, of).dtype
        if factor is None:
            continue
        if dtype not in EIGHT_BIT or (of != "q" and getattr(given, other) is not None):
            rule = f"it belongs to {of} of 8 bits, without {other}"
            raise AttentionError(f"{name} is {kind_of(factor)} and {of} has dtype {dtype}; {rule}")
        changed[other] = factor
    return Given(vars(given) | changed)


single_prefill_with_kv_cache_return_lse = partial(single_prefill_with_kv_cache, return_lse=True)
