"""A backward call: `Gradients`, the tensors that it reads and writes, and `CheckedBackward`, the call without them.

    L = sum(dout · out) + sum(dlse · lse)        forward: s = scale · q·k, x = f(s), p = exp(x - lse), out = Σ p · v

    dv = Σ pᵀ · dout         ds = p · (dout·v - delta) · f'(s)         dq = scale · ds · k         dk = scale · dsᵀ · q
    delta = Σ dout · out - dlse  (of a row)        dsinks = -Σ exp(sink - lse) · delta  (over the rows of a head)

    CheckedBackward ─┐
    Gradients ───────┴─► kernels/<arch>/backward/launch.py  list_backward_launches(checked, x, sequence) -> launches
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from warpattn.language.nodes import Program
from warpattn.problem.operands import addressable, packed, whole_runs
from warpattn.problem.problem import CheckedCall


class Gradients(NamedTuple):
    """Tensors of one backward call; shapes as the forward has them, so (B, S, H, D) or (total, H, D).

    Every gradient is written whole. An unwanted one is a tensor, too: the kernels compute all of them together.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor  # the forward's
    lse: Tensor  # the forward's, fp32 (B, Hq, Sq) or (Hq, total_q), sinks included, contiguous; -inf: no key is seen
    dout: Tensor  # shape and dtype of out
    dlse: Tensor | None  # shape of lse, fp32, contiguous; None is 0
    sinks: Tensor | None  # (Hq,) fp32
    dq: Tensor  # shape and dtype of q, any strides without overlap
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None  # (Hq,) fp32; None: not computed


@dataclass(frozen=True, eq=False)
class CheckedBackward:
    """A checked backward call.

    `forward` is the checked forward call: backend, problem, traced mask and score, scale. `slope` is the derivative of
    the score by s: a program with one output, the symbols of the score's program and its tensors in the same order;
    None if it is 1 everywhere. `deterministic`: dq has the same bits in every run; dk, dv and dsinks always have.
    """

    forward: CheckedCall
    slope: Program | None
    deterministic: bool

    @classmethod
    def of(cls, forward: CheckedCall, deterministic: bool) -> CheckedBackward:
        """The backward of a checked forward call, with the score's derivative."""
        if forward.score is None or forward.score.derivative.constant_slope == 1.0:
            return cls(forward, None, deterministic)
        derivative = forward.score.derivative
        return cls(forward, derivative.program(derivative.slope), deterministic)


def fitted_gradients(x: Gradients) -> Gradients:
    """Return the tensors as kernels take them. Inputs that TMA cannot address are copied; such gradients are replaced
    by temporaries, which `write_back` copies to them. No tensor object occurs twice."""
    read = {name: _readable(getattr(x, name)) for name in ("q", "k", "v", "out", "dout")}
    written = {name: _writable(getattr(x, name)) for name in ("dq", "dk", "dv")}
    fitting = x._replace(**read, **written, **fp32_fields(x))
    seen: set[int] = set()
    fresh = {}
    for name, tensor in zip(fitting._fields, fitting, strict=True):
        if tensor is not None and id(tensor) in seen:
            fresh[name] = tensor.detach()
        seen.add(id(tensor))
    return fitting._replace(**fresh)


def fp32_fields(x: Gradients) -> dict[str, Tensor | None]:
    """Return lse, dlse and sinks in fp32 and contiguous."""
    named = {"lse": x.lse, "dlse": x.dlse, "sinks": x.sinks}
    return {name: None if t is None else t.to(torch.float32).contiguous() for name, t in named.items()}


def write_back(fitting: Gradients, x: Gradients) -> None:
    """Copy gradients that were computed in temporaries into the caller's tensors."""
    for name in ("dq", "dk", "dv"):
        made, wanted = getattr(fitting, name), getattr(x, name)
        if made.data_ptr() != wanted.data_ptr():
            wanted.copy_(made[..., : wanted.shape[-1]])


def without_tiles(x: Gradients) -> None:
    """Write the gradients of a call without queries or without keys, which launches nothing: 0, but for dsinks the sum
    of dlse over a head's rows, since the LSE of such a row is the sink."""
    for gradient in (x.dq, x.dk, x.dv):
        gradient.zero_()
    if x.dsinks is not None:
        x.dsinks.zero_()
        if x.dlse is not None and x.dlse.numel():
            heads = x.dlse.ndim - 2
            x.dsinks.copy_(x.dlse.float().sum([d for d in range(x.dlse.ndim) if d != heads]))


def _readable(x: Tensor) -> Tensor:
    return x.detach() if addressable(x) else packed(x.detach())


def _writable(x: Tensor) -> Tensor:
    return x.detach() if addressable(x) else x.new_empty((*x.shape[:-1], whole_runs(x.shape[-1])))
