"""`attention_backward`: gradients from a forward's results."""

from __future__ import annotations

from torch import Tensor

from warpattn.api.dense import DENSE, placed
from warpattn.errors import AttentionError
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
    """dq, dk and dv of `attention`, or with `seq` of `attention_varlen`, for frameworks with an autograd of their own.

    out and lse are the forward's, dout is the gradient of out and has its shape and dtype. Where they are of more keys
    than k has, merged by their LSE, the gradients are the share of these keys. Where torch's autograd is at work
    nothing needs to call this. Raises AttentionError listing every broken rule.
    """
    if seq is not None and not isinstance(seq, Ragged):
        raise AttentionError(f"seq is a {type(seq).__name__}; seq must be None or a warpattn Ragged(cu_q)")
    call = Call(q, k, v, DENSE if seq is None else seq, mask, score, None, scale, True)
    dq, dk, dv = differentiate(placed(call, backend), Saved(q, k, v, out, lse, None), Along(dout, None))
    return dq, dk, dv
