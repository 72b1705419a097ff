"""`qv`, the absorbed query of latent attention: softmax(scale * (q kᵀ + qv vᵀ)) v, as in flash-attn 3 and 4.

    qv | q  ─▶ `LatentQuery` (…, dim_v | dim)    v | k  ─▶ keys (…, dim_v + dim), whose first columns are the values

Kernels take head dims 576 and 512 of latent decode and read both parts of such queries in place; queries of other head
dims are joined and run as ordinary attention. If k follows v in one buffer, as in a latent cache (512 + 64), keys and
values are views of it; else they are copied once. Without q and k (None, as in flash-attn 4) the values alone are
the keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from warpattn.errors import AttentionError
from warpattn.inputs import is_tensor, kind_of
from warpattn.integrations.signature import Given
from warpattn.sequences.latent import LATENT, ROTARY
from warpattn.sequences.latent_query import LatentQuery
from warpattn.torch_modes import without_autocast


def absorbed(given: Given, k_name: str = "k", v_name: str = "v") -> Given:
    """Replace `qv` by longer queries and keys. The default scale is that of the joined head dim."""
    tensors = {name: getattr(given, name) for name in ("q", "qv", k_name, v_name)}
    if tensors["q"] is None and tensors[k_name] is None:
        return Given(vars(given) | {"q": given.qv, k_name: tensors[v_name], "qv": None})
    _check(tensors, v_name)
    q, qv, k, v = tensors.values()
    if qv.shape != (*q.shape[:-1], v.shape[-1]):
        wanted = (*q.shape[:-1], v.shape[-1])
        raise AttentionError(f"qv has shape {tuple(qv.shape)}; it must be that of q with the head dim of v, {wanted}")
    if k.shape[:-1] != v.shape[:-1]:
        wanted = f"that of {v_name} but for the head dim, {tuple(v.shape)}"
        raise AttentionError(f"{k_name} has shape {tuple(k.shape)}; with qv it must be {wanted}")
    keys = joined(v, k)
    changed = {"q": queries(qv, q), k_name: keys, v_name: keys[..., : v.shape[-1]], "qv": None}
    return Given(vars(given) | changed)


def _check(tensors: dict[str, Any], v_name: str) -> None:
    """Check that tensors can be joined: one dtype, one device."""
    for name, x in tensors.items():
        if not is_tensor(x) or not x.ndim:
            raise AttentionError(f"{name} is {kind_of(x)}; with qv it must be a tensor")
    v = tensors[v_name]
    for name, x in tensors.items():
        if (x.dtype, x.device) != (v.dtype, v.device):
            rule = f"with qv it must be like {v_name}, {v.dtype} on {v.device}"
            raise AttentionError(f"{name} is {x.dtype} on {x.device}; {rule}")


def queries(latent: Tensor, rotary: Tensor) -> Tensor | LatentQuery:
    """Return queries of both parts: a `LatentQuery` if kernels take these sizes, else joined."""
    sizes = (latent.shape[-1], rotary.shape[-1])
    return LatentQuery(latent, rotary) if sizes == (LATENT, ROTARY) else joined(latent, rotary)


def joined(v: Tensor, k: Tensor) -> Tensor:
    """Return v and k side by side: a view if one buffer holds them so, else a copy."""
    size = v.shape[-1]
    one = v.shape[:-1] == k.shape[:-1] and v.stride() == k.stride() and v.dtype == k.dtype and v.stride(-1) == 1
    follows = v.data_ptr() + size * v.element_size() == k.data_ptr() and not (v.requires_grad or k.requires_grad)
    if one and follows and v.untyped_storage().data_ptr() == k.untyped_storage().data_ptr():
        return v.as_strided((*v.shape[:-1], size + k.shape[-1]), v.stride())
    with without_autocast(v.device):
        return torch.cat([v, k], dim=-1)
