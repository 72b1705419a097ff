"""`attention` of dense batches, and `attend_call`, through which the other functions of the API go, too."""

from __future__ import annotations

import torch
from torch import Tensor

from warpattn.api.otherwise import DENSE, attend_otherwise
from warpattn.masks import Mask
from warpattn.problem import Call, CheckedCall
from warpattn.problem.backends import Backend
from warpattn.quantized import EIGHT_BIT, Quantized, split
from warpattn.runtime.execute import attend
from warpattn.runtime.training.autograd import train
from warpattn.scores import Score
from warpattn.sequences import Dense
from warpattn.sequences.latent_query import WITH_PARTS, LatentQuery, parted


def attention(
    q: Tensor | Quantized | LatentQuery,
    k: Tensor | Quantized,
    v: Tensor | Quantized,
    *,
    mask: Mask | None = None,
    score: Score | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    backend: str | Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a batch of equally long sequences.

    q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv): fp16, bf16, fp32 or fp64, any strides; Hq is a multiple of
    Hkv and query head h reads key head h // (Hq / Hkv). Sq and Sk may differ and be 0. The keyword tail is described
    in `warpattn.api`.

    Returns out (B, Sq, Hq, Dv) in the dtype of q; with return_lse also lse (B, Hq, Sq), fp32 (fp64 for fp64).
    Raises AttentionError listing every broken rule.
    """
    sequence = DENSE
    if isinstance(q, WITH_PARTS) or isinstance(k, Quantized) or isinstance(v, Quantized):
        v_transposed = v.transposed if isinstance(v, Quantized) else None
        (q, q_fields), (k, k_scale), (v, v_scale) = parted(q), split(k), split(v)
        narrow = getattr(q, "dtype", None) in EIGHT_BIT
        sequence = Dense(k_scale, v_scale, **q_fields, v_transposed=v_transposed if narrow else None)
    return attend_call(Call(q, k, v, sequence, mask, score, sinks, scale, return_lse, out), backend)


def attend_call(call: Call, backend: str | Backend) -> Tensor | tuple[Tensor, Tensor]:
    """Return the result of a call, by the path for DTensors, for recorded calls, for gradients, or the ordinary one."""
    with_backend(call, backend)
    unusual = torch.compiler.is_compiling() or type(call.q) is not Tensor or torch._C._len_torch_dispatch_stack()
    result = attend_otherwise(call, backend) if unusual else None
    result = attend(call) if result is None else result
    return train(call, result) if isinstance(result, CheckedCall) else result


def with_backend(call: Call, backend: str | Backend) -> Call:
    """Set the backend of a call, which the caller has just made, and return the call."""
    if isinstance(backend, Backend):
        call.backend, call.deterministic = backend.name, backend.deterministic
    else:
        call.backend = backend
    return call
