"""Calls of 16 bits whose keys and values, perhaps queries, become tensors of 8 bits, or latents."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import warpattn as wa
from tests.oracle import Inputs
from warpattn.problem.backends import LATENT
from warpattn.sequences import Dense, PagedRagged


def in_eight_bits(inputs: Inputs, stored: tuple[str | int, ...], dtype: torch.dtype) -> Inputs:
    """The same with keys and values of an 8-bit `dtype`, and queries if `stored` says what their scales belong to; what
    no sequence owns stays NaN."""
    seq = inputs.sequence
    pages = seq.kv if isinstance(seq, PagedRagged) else seq
    assert isinstance(pages, wa.PagedKV | wa.Ragged | Dense)
    paged = isinstance(pages, wa.PagedKV)
    given = ((pages.k_pages, pages.v_pages) if paged else (inputs.k, inputs.v)) + (inputs.q,)
    k, v, *q = (_eight_bits(x, per, dtype) for x, per in zip(given, stored, strict=False))
    changes: dict[str, Any] = {"k_scale": k.scale, "v_scale": v.scale, "q_scale": q[0].scale if q else None}
    if paged:
        changes |= {"k_pages": k.values, "v_pages": v.values}
    pages = replace(pages, **changes)
    layout = replace(seq, kv=pages) if isinstance(seq, PagedRagged) else pages
    return replace(inputs, q=q[0].values if q else inputs.q, k=k.values, v=v.values, sequence=layout)


def over_latents(inputs: Inputs, per: str | int, dtype: torch.dtype) -> Inputs:
    """The same with keys whose first columns, which are the values, have 8 bits."""
    pages = inputs.sequence
    assert isinstance(pages, wa.PagedKV)
    latents, rope = pages.k_pages[..., : LATENT.v], pages.k_pages[..., LATENT.v :].contiguous()
    made = _eight_bits(latents, per, dtype)
    kv = wa.LatentPages(made.values, rope, pages.block_table, pages.lengths, scale=made.scale)
    return replace(inputs, k=kv.k_pages, v=kv.v_pages, sequence=kv)


def shared_latents(inputs: Inputs) -> Inputs:
    """The same with values that are the keys' first columns, in one memory."""
    seq = inputs.sequence
    cache = seq.kv if isinstance(seq, PagedRagged) else seq
    if isinstance(cache, wa.PagedKV):
        values = cache.k_pages[..., : LATENT.v]
        cache = replace(cache, v_pages=values)
        return replace(inputs, v=values, sequence=replace(seq, kv=cache) if isinstance(seq, PagedRagged) else cache)
    return replace(inputs, v=inputs.k[..., : LATENT.v])


def _eight_bits(x: Tensor, per: str | int, dtype: torch.dtype) -> wa.Quantized:
    """What is not finite has no part in the scales; e4m3 has NaN in the place of infinities."""
    finite = x.isfinite()
    made = wa.quantize(x.where(finite, 0.0), dtype, per=per)
    return wa.Quantized(made.values.float().where(finite, x.float()).to(dtype), made.scale)
