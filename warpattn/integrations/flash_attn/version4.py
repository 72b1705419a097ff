"""The functions of flash-attn 4: module `flash_attn.cute`. Both always return (out, lse or None).

Its `mask_mod` and `score_mod` are functions for CuTe's compiler; here they are plain Python functions with the same
order of arguments, or masks and scores of this package. Arguments in brackets may be missing from the end:

    mask_mod(b, h, q_idx, kv_idx, [seqlen_info,] [aux_tensors], [aux_scalars])     q_idx is the row, as there
    score_mod(score, b, h, q_idx, kv_idx, [seqlen_info,] [aux_tensors], [aux_scalars])

A single extra argument is aux_tensors, two are seqlen_info and aux_tensors. seqlen_info has seqlen_q and seqlen_k.
Functions are differentiated automatically, so there is no score_mod_bwd.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpattn.api import attention
from warpattn.errors import AttentionError, many
from warpattn.inputs import is_tensor, kind_of
from warpattn.integrations.flash_attn import packed, version3
from warpattn.integrations.flash_attn.latent import absorbed
from warpattn.integrations.flash_attn.modifiers import Tail, backend_for, scored, two_offsets, visible
from warpattn.integrations.flash_attn.version2 import NAMES
from warpattn.integrations.flex import MaskMod, ScoreMod
from warpattn.integrations.signature import Given, drop_in
from warpattn.language.traced import Lengths
from warpattn.masks import Mask
from warpattn.scores import Score

__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_varlen_func", "get_scheduler_metadata"]

VERSION = "4.0.0b36+warpattn"
_BLOCKS = "block lists are not taken: mask_mod alone decides (a mask of this package skips blocks by itself)"
_GRADIENT = "functions are differentiated automatically: leave it None"
_GATHERED = "keys are not gathered by index: leave it None, and let a mask_mod read a boolean table from aux_tensors"
REFUSED = {"gather_kv_indices": _GATHERED, "score_mod_bwd": _GRADIENT, "block_sparse_tensors": _BLOCKS}
HINTS = {"num_splits", "pack_gqa"}
SCHEDULE = {"min_seqlen_k", "scheduler_metadata", "seqlen_k_per_split", "disable_scheduler_metadata"}


class SeqlenInfo(NamedTuple):
    """The lengths of the current sequence, as functions for flash-attn 4 see them."""

    seqlen_q: Any
    seqlen_k: Any


@drop_in(
    "q, k, v, qv=None, gather_kv_indices=None, softmax_scale: number=None, causal=False, window_size=(None, None), "
    "learnable_sink: 1=None, softcap: number=0.0, num_splits=1, pack_gqa=None, deterministic=False, score_mod=None, "
    "score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, "
    "block_sparse_tensors_bwd=None, return_lse=False",
    REFUSED | {"block_sparse_tensors_bwd": _BLOCKS},
    HINTS,
    {"sinks": "learnable_sink"},
)
def flash_attn_func(given: Given) -> tuple[Tensor, Tensor | None]:
    """q (batch, seq_q, heads_q, dim), k (batch, seq_k, heads_kv, dim), v (batch, seq_k, heads_kv, dim_v); `latent` for
    qv (batch, seq_q, heads_q, dim_v)."""
    given = given if given.qv is None else absorbed(given)
    out, lse = attention(given.q, given.k, given.v, **_tail(given)._asdict(), return_lse=True)
    return out, lse if _keeps_lse(given) else None


@drop_in(
    "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, "
    "min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table: table=None, "
    "softmax_scale: number=None, causal=False, window_size=(None, None), learnable_sink: 1=None, "
    "softcap: number=0.0, num_splits=1, pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, "
    "mask_mod=None, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False, "
    "scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False",
    REFUSED,
    HINTS | SCHEDULE,
    NAMES | {"kv.block_table": "page_table", "kv.lengths": "seqused_k", "sinks": "learnable_sink"},
)
def flash_attn_varlen_func(given: Given) -> tuple[Tensor, Tensor | None]:
    """q (total_q, heads_q, dim) by cu_seqlens_q, or a batch without it; k and v likewise, or pages by page_table; qv
    like v in heads of q."""
    given = given if given.qv is None else absorbed(given)
    queries = packed.Queries(given.q, given.cu_seqlens_q, given.max_seqlen_q, given.seqused_q)
    lengths = given.cu_seqlens_k, given.max_seqlen_k, given.seqused_k
    out, lse = packed.attend(queries, packed.Keys(given.k, given.v, *lengths, given.page_table), _tail(given))
    return out, lse if _keeps_lse(given) else None


def _keeps_lse(given: Given) -> bool:
    """Whether flash-attn 4 returns the LSE: if it is wanted, or a gradient may be."""
    trained = (x for x in (given.q, given.k, given.v, given.learnable_sink) if isinstance(x, Tensor))
    return bool(given.return_lse) or any(x.requires_grad for x in trained)


@drop_in(
    "out_partial: tensor, lse_partial: tensor, out: tensor=None, out_dtype=None, cu_seqlens=None, seqused=None, "
    "virtual_batch_idx=None, return_lse=True",
    hints={"cu_seqlens", "seqused", "virtual_batch_idx"},
)
def flash_attn_combine(given: Given) -> tuple[Tensor, Tensor | None]:
    """Merge partial results over different keys, see `version3`; also rows that seqused leaves out."""
    out, lse = version3.flash_attn_combine(given.out_partial, given.lse_partial, given.out, given.out_dtype)
    return out, lse if given.return_lse else None


class SchedulerMetadata(NamedTuple):
    """What programs pass on as scheduler_metadata; it is empty, since plans are made per call. As in flash-attn, fields
    that were not prepared are None."""

    num_m_blocks_ptr: None = None
    num_splits_dynamic_ptr: None = None
    virtual_batch_idx_ptr: None = None
    num_nheads_in_l2_ptr: None = None
    tile_count_semaphore: None = None
    cu_total_m_blocks: Tensor | None = None
    cu_total_splits_m_blocks: None = None
    blocks_to_batch_idx: None = None


@drop_in(
    "max_seqlen_q, max_seqlen_k, nheads, nheads_kv, headdim, num_splits, headdim_v=None, pack_gqa=None, causal=False, "
    "window_size_left=None, window_size_right=None, seqlen_k_new=0, cu_seqlens_q: ints=None, cu_seqlens_k: ints=None, "
    "cu_seqlens_k_new=None, seqused_q: ints=None, seqused_k: ints=None, leftpad_k=None, seqlen_k_per_split=None",
    hints={
        "max_seqlen_q", "max_seqlen_k", "nheads", "nheads_kv", "headdim", "num_splits", "headdim_v", "pack_gqa",
        "causal", "window_size_left", "window_size_right", "seqlen_k_new", "cu_seqlens_k_new", "leftpad_k",
        "seqlen_k_per_split",
    },
)  # fmt: skip
def get_scheduler_metadata(given: Given) -> SchedulerMetadata:
    """An empty int32 tensor, and Nones, to pass on as scheduler_metadata."""
    lengths = (given.cu_seqlens_q, given.cu_seqlens_k, given.seqused_q, given.seqused_k)
    known = [x for x in lengths if x is not None]
    if not known:
        raise AttentionError("cu_seqlens_q, cu_seqlens_k, seqused_q and seqused_k are None; one of them must be given")
    return SchedulerMetadata(cu_total_m_blocks=torch.empty(0, dtype=torch.int32, device=known[0].device))


def _tail(given: Given) -> Tail:
    mask, score = visible(given.causal, two_offsets(given.window_size, given.causal)), scored(given.softcap)
    if given.mask_mod is not None:
        if mask is not None:
            raise AttentionError("mask_mod is given with causal or window_size; write them into mask_mod")
        mask = _mask(given.mask_mod, given)
    if given.score_mod is not None:
        if score is not None:
            raise AttentionError("score_mod is given with softcap; write it into score_mod")
        score = _score(given.score_mod, given)
    sink = given.learnable_sink
    if sink is not None and sink.dtype != getattr(given.q, "dtype", sink.dtype):
        sink = sink.to(torch.float32)
    return Tail(mask, score, sink, given.softmax_scale, backend_for(given.deterministic))


def _mask(mod: Any, given: Given) -> Mask:
    return mod if isinstance(mod, Mask) else MaskMod(mod, _extra("mask_mod", mod, 4, given))


def _score(mod: Any, given: Given) -> Score:
    return mod if isinstance(mod, Score) else ScoreMod(mod, _extra("score_mod", mod, 5, given))


def _extra(name: str, mod: Any, plain: int, given: Given) -> Callable[[Lengths], tuple[Any, ...]]:
    """Return the arguments after the indices, by how many the function takes."""
    try:
        parameters = inspect.signature(mod).parameters.values()
    except Exception as error:
        raise AttentionError(f"{name} is {kind_of(mod)}; it must be a Python function, or a mask or score") from error
    count = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty for p in parameters)
    if not plain <= count <= plain + 3:
        raise AttentionError(f"{name} takes {many(count, 'argument')}; it must take from {plain} to {plain + 3}")
    tensors, scalars = given.aux_tensors, given.aux_scalars
    if not (tensors is None or (isinstance(tensors, list | tuple) and all(map(is_tensor, tensors)))):
        raise AttentionError(f"aux_tensors is {kind_of(tensors)}; it must be a list of tensors")

    def extra(lens: Lengths) -> tuple[Any, ...]:
        every = (SeqlenInfo(lens.q, lens.k), tensors, scalars)
        return (tensors,) if count == plain + 1 else every[: count - plain]

    return extra
