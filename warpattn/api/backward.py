"""`attention_backward`: gradients of q, k and v from the results of a forward call."""

from __future__ import annotations

from torch import Tensor

from warpattn.api.dense import with_backend
from warpattn.api.otherwise import DENSE
from warpattn.errors import AttentionError
from warpattn.inputs import of_type
from warpattn.masks import Mask
from warpattn.problem import Call
from warpattn.problem.backends import Backend
from warpattn.runtime.training.from_results import differentiate
from warpattn.runtime.training.gradients import Along, Saved
from warpattn.scores import Score
from warpattn.sequences import Ragged


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    seq: Ragged | None = None,
    mask: Mask | None = None,
    score: Score | None = None,
    scale: float | None = None,
    backend: str | Backend = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv of `attention` (of `attention_varlen` with `seq`), for frameworks with their own autograd.

    out and lse are the results of the forward; dout is the gradient of out and has its shape and dtype. out and lse may
    also cover more keys than k holds (results merged by LSE): the gradients are then the part that these keys
    contribute. torch's autograd does not need this function. Raises AttentionError listing every broken rule.
    """
    if seq is not None and not isinstance(seq, Ragged):
        raise AttentionError(f"seq is {of_type(seq)}; seq must be None or a warpattn Ragged(cu_q)")
    call = Call(q, k, v, DENSE if seq is None else seq, mask, score, None, scale, True)
    dq, dk, dv = differentiate(with_backend(call, backend), Saved(q, k, v, out, lse, None), Along(dout, None))
    return dq, dk, dv
