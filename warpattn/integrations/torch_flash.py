"""Replaces torch's flash-attention operators by this package; `torch_sdpa.register` puts it in torch's registry.

    F.scaled_dot_product_attention ─▶ aten::_scaled_dot_product_flash_attention           CUDA  (batch, heads, seq, dim)
                                      aten::_scaled_dot_product_flash_attention_for_cpu   CPU
    varlen_attn, nested tensors ────▶ aten::_flash_attention_forward                      both  (batch, seq, heads, dim)
                                      aten::..._no_dropout_inplace                        both  or (total, heads, dim)
    their overloads `.quantized`      8-bit tensors with q_descale, k_descale, v_descale  both  (batch, heads_kv)

Their backward operators are replaced, too; they use the results of the forward. Where our kernels have no gradients,
the backward operator raises an error that says so.

`is_causal` is aligned to the top left in the operators of scaled_dot_product_attention, and to the bottom right in
`_flash_attention_forward`, as in torch. Results have the strides that torch's operators give them, which compiled
programs count on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from warpattn.api import attention, attention_backward
from warpattn.errors import AttentionError
from warpattn.integrations.flash_attn import descaled, packed
from warpattn.integrations.flash_attn.modifiers import Tail, scored, two_limits, visible
from warpattn.integrations.signature import TORCHS_NAMES, Given, drop_in, require_integers
from warpattn.masks import Causal, Mask, Materialized
from warpattn.quantized import result_dtype, split
from warpattn.sequences import Ragged

TOP_LEFT = Causal(top_left=True)
DROPOUT = {"dropout_p": "there is no dropout: pass 0.0, as for inference"}
REFUSED = DROPOUT | {"return_debug_mask": "there is no debug mask: it shows where dropout hit"}
SCHEDULE = {"num_splits"}
BACKWARD = "grad_out, query, key, value, out, logsumexp"
SEQUENCES = "cum_seq_q, cum_seq_k, max_q, max_k"
RANDOM = ("philox_seed", "philox_offset")
RAGGED = (
    "query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p=0.0, is_causal=False, return_debug_mask=False, "
    "*, scale=None, window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, "
    "block_table=None, num_splits=None"
)
NAMES = TORCHS_NAMES | {
    "dout": "grad_out",
    "lse": "logsumexp",
    "kv.k_pages": "key",
    "kv.v_pages": "value",
    "kv.block_table": "block_table",
    "page_table": "block_table",
    "kv.lengths": "seqused_k",
    "ALiBi.slopes": "alibi_slopes",
    **dict.fromkeys(("seq.cu_q", "cu_seqlens_q"), "cum_seq_q"),
    **dict.fromkeys(("seq.cu_k", "cu_seqlens_k"), "cum_seq_k"),
    **dict.fromkeys(("seq.max_q", "max_seqlen_q"), "max_q"),
    **dict.fromkeys(("seq.max_k", "max_seqlen_k"), "max_k"),
}


class Handle:
    """The handle that torch keeps while we are active; `remove()` restores torch's own operators."""

    def __init__(self, libraries: list[Library]) -> None:
        self.libraries = libraries

    def remove(self) -> None:
        while self.libraries:
            self.libraries.pop()._destroy()


def put_in_place() -> Handle:
    """Replace torch's operators until `remove()` of the result; warns once if `varlen_attn` would bypass them."""
    if prefers_cudnn():
        advice = "use sdpa_kernel(SDPBackend.FLASH_ATTENTION) or torch.backends.cuda.enable_cudnn_sdp(False)"
        warnings.warn(f"torch {torch.__version__}'s varlen_attn takes cuDNN's operators here, not these; {advice}",
                      stacklevel=3)  # fmt: skip
    cpu, cuda = Library("aten", "IMPL", "CPU"), Library("aten", "IMPL", "CUDA")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "[\\s\\S]*[Oo]verriding a previously registered kernel", UserWarning)
        for name, kernel, libraries in OPERATORS:
            for library in libraries:
                (cpu if library == "CPU" else cuda).impl(name, kernel)
    return Handle([cpu, cuda])


def prefers_cudnn() -> bool:
    """Whether `varlen_attn` would call cuDNN's operators, which stay torch's: 2.15 does so on Hopper and Blackwell."""
    if not torch.cuda.is_available() or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    from torch.nn.attention import varlen

    chooses = getattr(varlen, "_should_use_cudnn", None)  # torch's own question, 2.11 on; 2.13 always says no
    return chooses is not None and bool(chooses(torch.cuda.current_device()))


@drop_in("query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None", REFUSED,
         names=NAMES)  # fmt: skip
def _sdpa_cuda(given: Given) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_flash_attention: query (batch, heads, seq, dim)."""
    query = given.query
    out = torch.empty_like(query)  # strides as torch's kernel gives them
    lse = _dense(given, TOP_LEFT if given.is_causal else None, out)
    return out, lse, None, None, query.shape[2], given.key.shape[2], *_random_state(query)


@drop_in("query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None", DROPOUT, names=NAMES)
def _sdpa_cpu(given: Given) -> tuple[Tensor, Tensor]:
    """aten::_scaled_dot_product_flash_attention_for_cpu: query (batch, heads, seq, dim), attn_mask is added."""
    query, value = given.query, given.value
    out = torch.empty_like(query)
    if value.shape[-1] != query.shape[-1]:
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    lse = _dense(given, _added(given), out)
    return out, lse.transpose(1, 2).contiguous().transpose(1, 2)


@drop_in(f"{BACKWARD}, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None", DROPOUT, names=NAMES)
def _sdpa_backward_cpu(given: Given) -> tuple[Tensor, ...]:
    """aten::_scaled_dot_product_flash_attention_for_cpu_backward: (batch, heads, seq, dim), attn_mask is added."""
    gradients = _dense_backward(given, _added(given))
    return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in gradients)


@drop_in(
    f"{BACKWARD}, {SEQUENCES}, dropout_p=0.0, is_causal=False, philox_seed=None, philox_offset=None, *, scale=None",
    DROPOUT, {*SEQUENCES.split(", "), *RANDOM}, NAMES,
)  # fmt: skip
def _sdpa_backward_cuda(given: Given) -> tuple[Tensor, ...]:
    """aten::_scaled_dot_product_flash_attention_backward: (batch, heads, seq, dim)."""
    return _dense_backward(given, TOP_LEFT if given.is_causal else None)


@drop_in(
    "query, key, value, q_descale=None, k_descale=None, v_descale=None, dropout_p=0.0, is_causal=False, "
    "return_debug_mask=False, *, scale=None",
    REFUSED,
    names=NAMES,
)
def _sdpa_quantized(given: Given) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_flash_attention.quantized: the same over 8-bit keys and values, or with 8-bit queries,
    too, whose result is in bf16."""
    query, key, value = (x.transpose(1, 2) for x in (given.query, given.key, given.value))
    k, v = descaled.of_batch(key, value, descaled.Factors(given.k_descale, given.v_descale))
    q = descaled.of_queries(query, key, None, given.q_descale)
    out = torch.empty_like(given.query, dtype=result_dtype(query.dtype))
    mask = TOP_LEFT if given.is_causal else None
    with torch.no_grad():
        _, lse = attention(q, k, v, mask=mask, scale=given.scale, out=out.transpose(1, 2), return_lse=True)
    return out, lse, None, None, query.shape[1], key.shape[1], *_random_state(query)


@drop_in(RAGGED, REFUSED, SCHEDULE, NAMES)
def _flash(given: Given) -> tuple[Any, ...]:
    """aten::_flash_attention_forward: query (batch, seq, heads, dim), or (total, heads, dim) with cum_seq_q."""
    return *_ragged(given), *_random_state(given.query)


@drop_in(
    "query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p=0.0, is_causal=False, return_debug_mask=False, "
    "q_descale=None, k_descale=None, v_descale=None, *, scale=None, window_size_left=None, window_size_right=None, "
    "seqused_k=None, alibi_slopes=None",
    REFUSED,
    names=NAMES,
)
def _flash_quantized(given: Given) -> tuple[Any, ...]:
    """aten::_flash_attention_forward.quantized: the same over 8-bit keys and values, or with 8-bit queries, too."""
    factors = descaled.Factors(given.k_descale, given.v_descale)
    if given.cum_seq_k is None:
        k, v = descaled.of_batch(given.key, given.value, factors)
    else:
        k, v = descaled.of_rows(given.key, given.value, given.cum_seq_k, factors)
    q = descaled.of_queries(given.query, given.key, given.cum_seq_q, given.q_descale)
    changed = {"query": q, "key": k, "value": v, "block_table": None}
    return *_ragged(Given(vars(given) | changed)), *_random_state(given.query)


@drop_in(f"out, {RAGGED}", REFUSED, SCHEDULE, NAMES)
def _flash_inplace(given: Given) -> Tensor:
    """aten::_flash_attention_forward_no_dropout_inplace: the same into `out`; gives the LSE."""
    out, lse = _ragged(given)
    given.out.copy_(out)
    return lse


@drop_in(
    f"{BACKWARD}, {SEQUENCES}, dropout_p=0.0, is_causal=False, rng_state=None, unused=None, *, scale=None, "
    "window_size_left=None, window_size_right=None",
    DROPOUT, {"rng_state", "unused"}, NAMES,
)  # fmt: skip
def _flash_backward(given: Given) -> tuple[Tensor, ...]:
    """aten::_flash_attention_backward: (batch, seq, heads, dim), or (total, heads, dim) with cum_seq_q."""
    mask = visible(given.is_causal, two_limits((given.window_size_left, given.window_size_right)))
    seq = None
    if given.query.ndim == 3:
        for name in ("cum_seq_q", "cum_seq_k"):
            if getattr(given, name) is not None:
                require_integers(name, getattr(given, name))
        keys = None if given.cum_seq_k is None else given.cum_seq_k.to(torch.int32)
        seq = Ragged(given.cum_seq_q.to(torch.int32), keys, given.max_q, given.max_k)
    operands = (given.grad_out, given.query, given.key, given.value, given.out, given.logsumexp)
    return attention_backward(*operands, seq=seq, mask=mask, scale=given.scale)


def _added(given: Given) -> Mask | None:
    """Return the mask of attn_mask and is_causal, of both if both are given."""
    mask = given.attn_mask
    if mask is None:
        return TOP_LEFT if given.is_causal else None
    made = Materialized(mask[(None,) * (4 - mask.ndim)])
    return made & TOP_LEFT if given.is_causal else made


def _dense_backward(given: Given, mask: Any) -> tuple[Tensor, ...]:
    """dq, dk, dv of (batch, heads, seq, dim) operands."""
    rows = (given.grad_out, given.query, given.key, given.value, given.out)
    dout, q, k, v, out = (x.transpose(1, 2) for x in rows)
    gradients = attention_backward(dout, q, k, v, out, given.logsumexp, mask=mask, scale=given.scale)
    return tuple(x.transpose(1, 2) for x in gradients)


def _dense(given: Given, mask: Any, out: Tensor) -> Tensor:
    """Attend into `out` (batch, heads, seq, dim); return the LSE."""
    q, k, v, target = (x.transpose(1, 2) for x in (given.query, given.key, given.value, out))
    with torch.no_grad():  # an operator runs below autograd, which calls the backward operator
        _, lse = attention(q, k, v, mask=mask, scale=given.scale, out=target, return_lse=True)
    return lse


def _ragged(given: Given) -> tuple[Tensor, Tensor]:
    for name in ("seqused_k", "alibi_slopes", "block_table"):
        operands = (x for x in (given.query, given.key, given.value) if isinstance(x, Tensor))
        if getattr(given, name) is not None and torch.is_grad_enabled() and any(x.requires_grad for x in operands):
            rule = "torch's backward operator does not get it: run under torch.no_grad(), or call warpattn.attention"
            raise AttentionError(f"{name} is given and an input requires a gradient; {rule}")
    window = (given.window_size_left, given.window_size_right)
    tail = Tail(visible(given.is_causal, two_limits(window)), scored(slopes=given.alibi_slopes), scale=given.scale)
    queries = packed.Queries(given.query, given.cum_seq_q, given.max_q)
    keys = packed.Keys(given.key, given.value, given.cum_seq_k, given.max_k, given.seqused_k, given.block_table)
    with torch.no_grad():
        if all(x is None for x in (given.cum_seq_q, given.cum_seq_k, given.seqused_k, given.block_table)):
            out, lse = attention(given.query, given.key, given.value, **tail._asdict(), return_lse=True)
        else:
            out, lse = packed.attend(queries, keys, tail)
    return _laid_like(out, split(given.query)[0]), lse


def _laid_like(x: Tensor, like: Tensor) -> Tensor:
    """Return x with the strides of torch.empty_like(like)."""
    if x.shape != like.shape:
        return x
    target = torch.empty_like(like, dtype=x.dtype)
    return x if target.stride() == x.stride() else target.copy_(x)


def _random_state(like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return rng_state, unused and debug mask: results that exist for dropout."""
    zeros = [torch.zeros(shape, dtype=torch.uint64, device=like.device) for shape in ((2,), ())]
    return zeros[0], zeros[1], like.new_empty(0)


OPERATORS: tuple[tuple[str, Callable[..., Any], tuple[str, ...]], ...] = (
    ("_scaled_dot_product_flash_attention", _sdpa_cuda, ("CPU", "CUDA")),
    ("_scaled_dot_product_flash_attention.quantized", _sdpa_quantized, ("CPU", "CUDA")),
    ("_scaled_dot_product_flash_attention_for_cpu", _sdpa_cpu, ("CPU",)),
    ("_scaled_dot_product_flash_attention_for_cpu_backward", _sdpa_backward_cpu, ("CPU",)),
    ("_flash_attention_forward", _flash, ("CPU", "CUDA")),
    ("_flash_attention_forward.quantized", _flash_quantized, ("CPU", "CUDA")),
    ("_flash_attention_forward_no_dropout_inplace", _flash_inplace, ("CPU", "CUDA")),
    ("_flash_attention_backward", _flash_backward, ("CPU", "CUDA")),
    ("_scaled_dot_product_flash_attention_backward", _sdpa_backward_cuda, ("CPU", "CUDA")),
)
