"""What users call: `attention`, `attention_varlen`, `attention_paged`, with one keyword tail.

    Call -> execute.attend -> validate (every rule, Problem) -> reference                    on the CPU or on request
                                                             -> plan, launches               on a card

Features are values: a new mask, score or layout is a new object in `mask=`, `score=` or the sequence argument, and the
signatures stay. The tail, the same everywhere:

    mask        Mask or None: which keys a query sees; None is all of them
    score       Score or None: what happens to scale * q.k before the softmax
    sinks       (Hq,) fp32 or the dtype of q, or None: one logit per query head, counted once per row in the denominator
    scale       number, 1/sqrt(D) by default; absorbed latent attention (D 576): that of its heads before absorption
    return_lse  also return the natural log of each row's whole denominator, sinks included (fp32, or fp64 for fp64)
    out         tensor to write the output into and return; shape, dtype and device of the result, any strides that
                give each element its own place; no memory of q, k, v or sinks
    backend     "auto": the kernels for the card that q is on, "sm90" (Hopper), "sm100" (Blackwell), "gfx942" (CDNA3)
                or "gfx950" (CDNA4), or on the CPU "reference". "reference": any device, differentiable, fp16, bf16,
                fp32, fp64. A card's name: its kernels, fp16 and bf16. "simulate:sm90" and so on: these kernels run by
                the simulator on CPU tensors. A named backend never falls back. Or a `Backend`, which also says whether
                gradients are deterministic.

The Hopper kernels read and write the tensors in place if TMA can address them: the last stride is 1, the others are
multiples of 8 elements above 0 (those of dimensions of size 1 do not matter), the head dim is a multiple of 8, and the
first element starts at a multiple of 16 bytes. q, k and v that do not fit, such as expanded ones, are copied once; such
an `out` is computed aside and copied.

Tensors are plain ones with values: nested, sparse and meta tensors, subclasses of another meaning and unresolved
negative bits are refused, of NumPy's arrays, too. Numbers may be NumPy's or tensors without dimensions. A batch without
sequences, heads or rows gives an empty result.

Masks are aligned to the bottom right: query row i of a sequence sits at key position i + len_k - len_q. A row that sees
no key gives 0 and an LSE of -inf (with sinks: 0 and the sink). Every function raises one AttentionError (a ValueError)
that lists all broken rules before anything runs.

Keys and values may have 8 bits where q has 16 or 32: plain tensors, `Quantized(values, scale)`, or pages of a `PagedKV`
with k_scale and v_scale. They mean values · scale, computed in fp32. Queries of 8 bits have the dtype of k and v, and
the result then has the dtype of `out`, bf16 without one. Prefill that is not paged multiplies in 8 bits then.

Absorbed queries of latent attention may be in two tensors, `LatentQuery(nope, rope)`: kernels read both where they are.

Kernels run on torch's current stream and may be captured into CUDA graphs. Inside of torch.compile(fullgraph=True)
a call becomes one operator, which does not read the values of lengths, offsets and tables; broken rules are raised when
the graph runs. There `~mask` has to be written outside of the compiled function.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from warpattn.errors import AttentionError
from warpattn.masks import Mask
from warpattn.problem import Call, CheckedCall
from warpattn.problem.backends import Backend
from warpattn.quantized import Quantized, split
from warpattn.runtime.execute import attend
from warpattn.runtime.training.autograd import train
from warpattn.runtime.training.from_results import differentiate
from warpattn.runtime.training.gradients import Along, Saved
from warpattn.scores import Score
from warpattn.sequences import Dense, PagedKV, PagedRagged, Ragged
from warpattn.sequences.latent_query import WITH_PARTS, LatentQuery, parted

DENSE = Dense()


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
    at the top of this module.

    Returns out (B, Sq, Hq, Dv) in the dtype of q; with return_lse also lse (B, Hq, Sq).
    Raises AttentionError listing every broken rule.
    """
    sequence = DENSE
    if isinstance(q, WITH_PARTS) or isinstance(k, Quantized) or isinstance(v, Quantized):
        (q, of_q), (k, k_scale), (v, v_scale) = parted(q), split(k), split(v)
        sequence = Dense(k_scale, v_scale, **of_q)
    return _attend(Call(q, k, v, sequence, mask, score, sinks, scale, return_lse, out), backend)


def attention_varlen(
    q: Tensor | Quantized | LatentQuery,
    k: Tensor | Quantized,
    v: Tensor | Quantized,
    seq: Ragged,
    *,
    mask: Mask | None = None,
    score: Score | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    backend: str | Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over sequences of different lengths laid end to end, without padding.

    q (total_q, Hq, D), k (total_k, Hkv, D), v (total_k, Hkv, Dv); `seq` says where each sequence starts. Masks and
    scores see positions within a sequence. The keyword tail is described at the top of this module.

    Returns out (total_q, Hq, Dv) in the dtype of q; with return_lse also lse (Hq, total_q).
    Raises AttentionError listing every broken rule.
    """
    if not isinstance(seq, Ragged):
        raise AttentionError(f"seq is a {type(seq).__name__}; seq must be a warpattn Ragged(cu_q, cu_k)")
    if isinstance(q, WITH_PARTS) or isinstance(k, Quantized) or isinstance(v, Quantized):
        (q, of_q), (k, k_scale), (v, v_scale) = parted(q), split(k), split(v)
        seq = replace(seq, k_scale=k_scale, v_scale=v_scale, **of_q)
    return _attend(Call(q, k, v, seq, mask, score, sinks, scale, return_lse, out), backend)


def attention_paged(
    q: Tensor | Quantized | LatentQuery,
    kv: PagedKV,
    seq: Ragged | None = None,
    *,
    mask: Mask | None = None,
    score: Score | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    backend: str | Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a paged key/value cache.

    q (B, Sq, Hq, D): the newest Sq positions of each sequence; `kv` holds the pages, the block table and the lengths,
    which include those positions. The keyword tail is described at the top of this module.

    With `seq` = Ragged(cu_q) sequences may have different numbers of newest positions, laid end to end: q (total_q, Hq,
    D), any mix of prompts, parts of prompts and single new tokens, as a step of an engine has. The host reads no
    lengths: sequences of few queries go to the decode kernel and others to the prefill kernel on the device, in a fixed
    number of launches. `seq.max_q`, the most queries of a sequence, saves the launches that it rules out. On a card
    cu_q may end before total_q: rows after it are padding and are not written.

    Returns out (B, Sq, Hq, Dv) in the dtype of q; with return_lse also lse (B, Hq, Sq). With `seq` these are (total_q,
    Hq, Dv) and (Hq, total_q).
    Raises AttentionError listing every broken rule.
    """
    if not isinstance(kv, PagedKV):
        rule = "kv must be a warpattn PagedKV(k_pages, v_pages, block_table, lengths)"
        raise AttentionError(f"kv is a {type(kv).__name__}; {rule}")
    if seq is not None and not isinstance(seq, Ragged):
        raise AttentionError(f"seq is a {type(seq).__name__}; seq must be None or a warpattn Ragged(cu_q)")
    if isinstance(q, WITH_PARTS):
        q, of_q = parted(q)
        kv = kv.with_fields(**of_q)
    layout = kv if seq is None else PagedRagged(kv, seq)
    call = Call(q, kv.k_pages, kv.v_pages, layout, mask, score, sinks, scale, return_lse, out)
    if isinstance(kv.shared_pages, int) and kv.shared_pages and not torch.compiler.is_compiling():
        from warpattn.runtime.merging.cascade import cascaded  # few calls need it

        result = cascaded(_placed(call, backend))
        if result is not None:
            return result
    return _attend(call, backend)


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
    dq, dk, dv = differentiate(_placed(call, backend), Saved(q, k, v, out, lse, None), Along(dout, None))
    return dq, dk, dv


def _attend(call: Call, backend: str | Backend) -> Tensor | tuple[Tensor, Tensor]:
    if type(call.q) is not Tensor and _is_distributed(call):
        from warpattn.distributed import tensors  # imports torch.distributed

        return tensors.attend(call, backend)
    if type(backend) is str:
        call.backend = backend
    else:
        _placed(call, backend)
    if torch.compiler.is_compiling():
        from warpattn.runtime.torch_op import tracing  # imports torch._dynamo

        return tracing.attend(call)
    result = attend(call)
    return train(call, result) if isinstance(result, CheckedCall) else result


def _is_distributed(call: Call) -> bool:
    """Whether the queries of a dense call are a DTensor."""
    return type(call.q).__module__ == "torch.distributed.tensor" and call.sequence is DENSE


def _placed(call: Call, backend: str | Backend) -> Call:
    """The call, which is the caller's own, with its backend."""
    if isinstance(backend, Backend):
        call.backend, call.deterministic = backend.name, backend.deterministic
    else:
        call.backend = backend
    return call
