"""Whose gradients `bench.backward` times: ours, in two forms, torch's cuDNN SDPA, flash-attn-4 and FlexAttention.

Each peer takes a case and its inputs and gives a function without arguments that makes dq, dk and dv.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.backward.cases import Case, Inputs, Made
from warpattn.kernels.sm90.backward.launch import list_backward_launches
from warpattn.problem import Call, validate
from warpattn.problem.backward import CheckedBackward, Gradients, fitted_gradients
from warpattn.problem.launch import Launch
from warpattn.runtime.bound_launches import BoundLaunches

Gradient = Callable[[], Made]


def own(case: Case, x: Inputs, deterministic: bool = False) -> Gradient:
    """Our launches on tensors that stay; of both passes, the public function with FlexAttention's own functions."""
    if case.both:
        return _both(case, x)
    bound, made = prepared(case, x, deterministic)

    def call() -> Made:
        bound.launch()
        return made.dq, made.dk, made.dv

    return call


def deterministic(case: Case, x: Inputs) -> Gradient:
    """The same with the same bits in every run."""
    if case.both:
        raise ValueError("only the gradients alone are timed")
    return own(case, x, deterministic=True)


def prepared(case: Case, x: Inputs, deterministic: bool) -> tuple[BoundLaunches, Gradients]:
    """Bound launches of a case and the tensors that they write."""
    import warpattn as wa

    keywords: dict[str, Any] = {"mask": case.mask, "score": case.score(x.q.device), "return_lse": True}
    with torch.no_grad():
        if case.lengths is None:
            out, lse = wa.attention(x.q, x.k, x.v, **keywords)
        else:
            out, lse = wa.attention_varlen(x.q, x.k, x.v, wa.Ragged(case.offsets(x.q.device)), **keywords)
    made = gradients_of(x, out, lse)
    return BoundLaunches(launches(case, x, made, deterministic), x.q.get_device()), made


def gradients_of(x: Inputs, out: Tensor, lse: Tensor) -> Gradients:
    """The tensors of a backward call, gradients in fresh memory."""
    fresh = [torch.empty_like(t) for t in (x.q, x.k, x.v)]
    return fitted_gradients(Gradients(x.q, x.k, x.v, out, lse, x.dout, None, None, *fresh, None))


def launches(case: Case, x: Inputs, made: Gradients, deterministic: bool = False) -> tuple[Launch, ...]:
    """Of a backward call."""
    backend = "auto" if x.q.is_cuda else "simulate:sm90"
    sequence = case.sequence(x.q.device)
    forward = Call(x.q, x.k, x.v, sequence, case.mask, case.score(x.q.device), return_lse=True, backend=backend)
    return list_backward_launches(CheckedBackward.of(validate(forward), deterministic), made, sequence)


def cudnn(case: Case, x: Inputs) -> Gradient:
    """The backward of torch's SDPA by cuDNN."""
    if case.window or case.lengths or case.softcap or case.alibi:
        raise ValueError("torch's SDPA has no window, packed sequences or score functions")
    leaves = [t.detach().transpose(1, 2).requires_grad_() for t in (x.q, x.k, x.v)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(
            *leaves, is_causal=case.causal, enable_gqa=case.heads_kv is not None
        )
    return _autograd(out, leaves, x.dout.transpose(1, 2), _swapped)


def fa4(case: Case, x: Inputs) -> Gradient:
    """flash-attn-4."""
    from flash_attn.cute.interface import flash_attn_func, flash_attn_varlen_func

    if case.alibi:
        raise ValueError("its score functions need a derivative by hand")
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    keywords: dict[str, Any] = {"causal": case.causal and not case.window, "softcap": case.softcap or 0.0}
    keywords["window_size"] = (case.window - 1, 0) if case.window else (None, None)
    if case.lengths is None:
        out = flash_attn_func(*leaves, **keywords)[0]
    else:
        at, most = case.offsets(x.q.device), max(case.lengths)
        offsets = {"cu_seqlens_q": at, "cu_seqlens_k": at, "max_seqlen_q": most, "max_seqlen_k": most}
        out = flash_attn_varlen_func(*leaves, **offsets, **keywords)[0]
    return _autograd(out, leaves, x.dout, lambda t: t)


def flex(case: Case, x: Inputs) -> Gradient:
    """FlexAttention, compiled with its block mask and its score function."""
    import torch._dynamo
    import torch._functorch.config
    import torch._inductor.config
    from torch.nn.attention.flex_attention import flex_attention

    if not case.alibi:
        raise ValueError("it is compared where a score is a function")
    score_mod, block_mask = _flex_functions(case, x)
    torch._dynamo.reset()
    torch._inductor.config.compile_threads = 1
    torch._functorch.config.donated_buffer = case.both  # gradients alone are taken again and again of one forward
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    leaves = [t.detach().transpose(1, 2).requires_grad_() for t in (x.q, x.k, x.v)]

    def forward() -> Tensor:
        grouped = case.heads_kv is not None
        return compiled(*leaves, score_mod=score_mod, block_mask=block_mask, enable_gqa=grouped)

    dout = x.dout.transpose(1, 2)
    if not case.both:
        return _autograd(forward(), leaves, dout, _swapped)
    return lambda: _grad(forward(), leaves, dout, _swapped)


def _both(case: Case, x: Inputs) -> Gradient:
    """`warpattn.attention` and its gradients, mask and score made once of FlexAttention's functions."""
    import warpattn as wa
    from warpattn.integrations.flex import mask_of, score_of

    score_mod, block_mask = _flex_functions(case, x)
    mask = None if block_mask is None else mask_of(block_mask)
    score = None if score_mod is None else score_of(score_mod)
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    return lambda: _grad(wa.attention(*leaves, mask=mask, score=score), leaves, x.dout, lambda t: t)


def _flex_functions(case: Case, x: Inputs) -> tuple[Any, Any]:
    """FlexAttention's score function and block mask of a case, or None."""
    from torch.nn.attention.flex_attention import create_block_mask

    slopes = case.slopes(x.q.device)

    def alibi(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score - slopes[h] * (q - k)

    def keep(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    mask = create_block_mask(keep, None, None, case.seq, case.seq, device=x.q.device) if case.causal else None
    return alibi if case.alibi else None, mask


def _swapped(t: Tensor) -> Tensor:
    return t.transpose(1, 2)


def _autograd(out: Tensor, leaves: list[Tensor], dout: Tensor, view: Callable[[Tensor], Tensor]) -> Gradient:
    return lambda: _grad(out, leaves, dout, view, again=True)


def _grad(
    out: Tensor, leaves: list[Tensor], dout: Tensor, view: Callable[[Tensor], Tensor], again: bool = False
) -> Made:
    dq, dk, dv = torch.autograd.grad(out, leaves, dout, retain_graph=again)
    return view(dq), view(dk), view(dv)


PEERS = {"warpattn": own, "deterministic": deterministic, "cudnn": cudnn, "fa4": fa4, "flex": flex}
