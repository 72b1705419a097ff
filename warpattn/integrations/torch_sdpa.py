"""`torch.nn.functional.scaled_dot_product_attention` on this package's kernels, in three ways.

    scaled_dot_product_attention(q, k, v, is_causal=True)     the function itself, with torch's signature
    with swapped(): model(x)                                  every call of torch's function in the block is ours
    register(); activate_flash_attention_impl("warpattn")     ours as torch's "flash" implementation (see `torch_flash`)

The first two serve every call or raise. The third replaces the operators that torch chooses itself: calls without a
mask tensor, dtypes and head dimensions that torch considers fit for a flash kernel; torch's other backends stay as
they are.

`is_causal` is aligned to the top left, as torch's is: query i sees keys 0 .. i. A row that sees no key gives 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import TorchFunctionMode

from warpattn.api import attention, attention_varlen
from warpattn.errors import AttentionError, many
from warpattn.inputs import is_tensor, kind_of, number, of_type
from warpattn.integrations import torch_multi_head
from warpattn.integrations.signature import TORCHS_NAMES, is_flag, with_names
from warpattn.integrations.vmapped import is_mapping, over_leading
from warpattn.masks import Causal, Mask, Materialized
from warpattn.sequences import Ragged
from warpattn.torch_modes import autocast

NAME = "warpattn"
TOP_LEFT = Causal(top_left=True)


@with_names(TORCHS_NAMES)
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's function. query (..., Hq, L, E), key (..., Hkv, S, E), value (..., Hkv, S, Ev); returns (..., Hq, L, Ev).

    Leading dimensions broadcast; without any there is one head. attn_mask broadcasts to (..., Hq, L, S): bool, True is
    visible, or float, which is added, or a CausalBias. With enable_gqa Hq may be a multiple of the heads of key and of
    value. Within torch.autocast the dtype is that of the region. The result is laid out like query. Nested tensors of
    jagged layout (batch, heads, ragged, head_dim) give such a tensor; they take no attn_mask. torch.vmap maps it, but
    not its gradients (vmap of grad). Raises AttentionError, also for dropout.
    """
    if not torch.compiler.is_compiling() and is_mapping():
        for name, x in (("query", query), ("key", key), ("value", value)):
            if isinstance(x, Tensor) and x.ndim < 2:
                rule = "it must be (..., heads, seq, head_dim), of rank 2 at least"
                raise AttentionError(f"{name} has shape {tuple(x.shape)} within torch.vmap; {rule}")
        tail = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return over_leading(partial(scaled_dot_product_attention, **tail), query, key, value, attn_mask)
    named = {"query": query, "key": key, "value": value}
    nested = any(isinstance(x, Tensor) and x.is_nested for x in named.values())
    broken = _broken_options(attn_mask, dropout_p, is_causal, enable_gqa)
    if nested and attn_mask is not None:
        broken.append("attn_mask is given with nested tensors; they take is_causal only")
    broken += [] if nested else [_shapeless(name, x) for name, x in named.items() if not is_tensor(x) or x.ndim < 2]
    if broken:
        raise AttentionError(*broken)
    mask = TOP_LEFT if is_causal else None
    if nested:
        return _nested(query, key, value, mask, scale, enable_gqa)
    query, key, value = (autocast(x) for x in (query, key, value))
    if enable_gqa and all(x.ndim > 2 for x in (query, key, value)) and key.shape[-3] != value.shape[-3]:
        key, value = (_repeated(x, query.shape[-3], -3) for x in (key, value))
    if isinstance(attn_mask, CausalBias):
        mask = _causal(attn_mask, query, key)
    lead = _leading(query, key, value, enable_gqa)
    q, k, v = (_four_dimensions(x, lead).transpose(1, 2) for x in (query, key, value))
    if mask is None and attn_mask is not None:
        mask = _mask(attn_mask, lead)
    out = attention(q, k, v, mask=mask, scale=scale)
    assert isinstance(out, Tensor)  # return_lse is off
    result = out.transpose(1, 2).reshape(*lead, *query.shape[-2:-1], value.shape[-1])
    like_rows = query.ndim == 4 and query.transpose(1, 2).is_contiguous() and not query.is_contiguous()
    return result if like_rows else result.contiguous()  # as torch does, so that .view() works


def _broken_options(attn_mask: object, dropout_p: object, is_causal: object, enable_gqa: object) -> list[str]:
    """One sentence for each option that is not served."""
    broken = []
    if dropout_p is not None and number(dropout_p) != 0:
        broken.append(f"dropout_p is {kind_of(dropout_p)}; there is no dropout: pass 0.0, as for inference")
    flags = {"is_causal": is_causal, "enable_gqa": enable_gqa}
    wrong = {name: flag for name, flag in flags.items() if not is_flag(flag)}
    broken += [f"{name} is {kind_of(flag)}; it must be True or False" for name, flag in wrong.items()]
    if attn_mask is not None and not wrong and is_causal:
        broken.append("attn_mask is given with is_causal=True; write causality into the mask")
    return broken


def _shapeless(name: str, x: object) -> str:
    """Say why a value is no tensor of heads, rows and columns."""
    plain = f"a tensor of shape {tuple(x.shape)}" if is_tensor(x) else of_type(x)
    got = kind_of(x) if isinstance(x, Tensor) and not is_tensor(x) else plain
    return f"{name} is {got}; it must be a tensor (..., heads, seq, head_dim)"


def _repeated(x: Tensor, heads: int, dim: int) -> Tensor:
    """Repeat each head, in `dim`, to get `heads`; keys and values may have different numbers of heads."""
    if not x.shape[dim] or heads % x.shape[dim]:
        what = f"query has {many(heads, 'head')} and key or value {x.shape[dim]}"
        raise AttentionError(f"{what}; they must divide those of query")
    return x.repeat_interleave(heads // x.shape[dim], dim=dim)


def _causal(bias: CausalBias, query: Tensor, key: Tensor) -> Mask:
    """Convert a causal mask of torch.nn.attention.bias, which holds no values."""
    made, wanted = (bias.seq_len_q, bias.seq_len_kv), (query.shape[-2], key.shape[-2])
    if made != wanted:
        raise AttentionError(f"attn_mask is a CausalBias for {made} queries and keys; they are {wanted}")
    return Causal(top_left=bias.variant == CausalVariant.UPPER_LEFT)


_multi_head_attention_forward = torch_multi_head.calling(scaled_dot_product_attention)


@contextmanager
def swapped() -> Iterator[None]:
    """Within the block `torch.nn.functional.scaled_dot_product_attention` is ours for every caller in this thread.

    Layers of torch are such callers, an nn.MultiheadAttention with need_weights=False only. What a checkpoint with
    use_reentrant=False runs again in backward is one, too, in the block or after it; what one with use_reentrant=True
    runs again calls torch's function, with the same gradients up to rounding, unless it enters a block itself.
    """
    with _Swap(None if torch.compiler.is_compiling() else _pack_hook()):
        yield


class _Swap(TorchFunctionMode):
    """Redirects calls of torch's function to ours. pack: the hook of the checkpoint that the block is in."""

    def __init__(self, pack: Any) -> None:
        super().__init__()
        self.pack = pack

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            func = scaled_dot_product_attention
        elif func is torch_multi_head.TORCHS:
            func = _multi_head_attention_forward
        else:
            return func(*args, **(kwargs or {}))
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._swap_when_run_again()
        return func(*args, **(kwargs or {}))

    def _swap_when_run_again(self) -> None:
        """Let the non-reentrant checkpoint within the block that a call is in, if any, run its function again in one.

        torch compares the tensors that the two runs save, but repeats autocast and a default device only. The
        checkpoint is known by the frame in its hook for saved tensors, where tests find it.
        """
        pack = _pack_hook()
        if pack is self.pack:
            return
        for cell in getattr(pack, "__closure__", None) or ():
            run = getattr(frame := cell.cell_contents, "recompute_fn", None)
            if run is not None and not isinstance(run, _Again):
                frame.recompute_fn = _Again(run)


def _pack_hook() -> Any:
    """Return the innermost hook for saved tensors, for which torch has no public name, or None."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # type: ignore[attr-defined]
    hooks = top and top(True)
    return hooks and hooks[0]


class _Again(NamedTuple):
    """A checkpoint's function, run within a block."""

    run: Callable[..., None]

    def __call__(self, *args: Any) -> None:
        with _Swap(None):
            self.run(*args)


def register(name: str = NAME) -> None:
    """Make `name` known to torch's registry of flash-attention implementations; registering again changes nothing.

    Then torch.nn.attention.activate_flash_attention_impl(name) puts our kernels in place, and
    restore_flash_attention_impl() torch's own again. Raises AttentionError where torch has no registry.
    """
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError as error:
        rule = "it has no registry of flash-attention implementations; use scaled_dot_product_attention or swapped()"
        raise AttentionError(f"torch is {torch.__version__}; {rule}") from error
    from warpattn.integrations.torch_flash import put_in_place

    register_flash_attention_impl(name, register_fn=put_in_place)


def _leading(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[int, ...]:
    """Return the leading dimensions of the result, heads included."""
    grouped = enable_gqa and all(x.ndim > 2 for x in (query, key, value))
    shapes = [tuple(x.shape[: -3 if grouped else -2]) for x in (query, key, value)]
    try:
        lead = tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError as error:
        rule = "dimensions before the last two must broadcast, and enable_gqa=True lets heads of query be a multiple"
        raise AttentionError(
            f"query, key and value have shapes {', '.join(str(tuple(x.shape)) for x in (query, key, value))}; {rule}"
        ) from error
    return (*lead, query.shape[-3]) if grouped else lead


def _four_dimensions(x: Tensor, lead: tuple[int, ...]) -> Tensor:
    """Reshape x to (batch, its heads, seq, head_dim), expanded where it broadcasts."""
    heads = lead[-1:] if x.ndim < 3 or x.shape[-3] == 1 or not lead else x.shape[-3:-2]
    x = x.expand(*lead[:-1], *heads, *x.shape[-2:])
    return x.reshape(math.prod(lead[:-1]), *(heads or (1,)), *x.shape[-2:])


def _mask(mask: Tensor, lead: tuple[int, ...]) -> Mask:
    """Convert attn_mask to (batch, heads, L, S), where any may be 1."""
    absent = not isinstance(mask, Tensor) or mask.is_nested or mask.device.type == "meta"
    fits = not absent and 2 <= mask.ndim <= len(lead) + 2
    if fits and len(lead) > 2:  # leading dimensions become one, so that `attention` does not see them
        own = mask.shape[:-3]
        fits = all(size in (1, whole) for size, whole in zip(own, lead[len(lead) - 1 - len(own) : -1], strict=True))
    if not fits:
        kind = kind_of(mask) if isinstance(mask, Tensor) else of_type(mask)
        got = f"is {kind}" if absent else f"has shape {tuple(mask.shape)}"
        shape = ", ".join(map(str, (*lead, "L", "S")))
        raise AttentionError(f"attn_mask {got}; it must be a tensor (…, L, S) that broadcasts to ({shape})")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise AttentionError(f"attn_mask has dtype {mask.dtype}; it must be bool, True being visible, or float")
    mask = autocast(mask)
    mask = mask[(None,) * max(len(lead) + 2 - mask.ndim, 4 - mask.ndim)]
    if mask.ndim > 4:
        mask = mask.expand(*lead[:-1], *mask.shape[-3:]).flatten(0, -4)
    return Materialized(mask)


def _nested(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, scale: float | None, enable_gqa: bool
) -> Tensor:
    """Attend jagged tensors (batch, heads, ragged, head_dim)."""
    (q, starts_q), (k, starts_k), (v, starts_v) = (
        _jagged(name, x) for name, x in (("query", query), ("key", key), ("value", value))
    )
    if starts_v is not starts_k and not torch.equal(starts_v, starts_k):
        raise AttentionError("value has other lengths than key; they must be equal")
    heads = q.shape[1]
    if not enable_gqa and {k.shape[1], v.shape[1]} - {1, heads}:
        what = f"query has {many(heads, 'head')}, key {k.shape[1]} and value {v.shape[1]}"
        raise AttentionError(f"{what}; enable_gqa=True lets heads of query be a multiple")
    q, k, v = (autocast(x) for x in (q, k, v))
    if k.shape[1] != v.shape[1]:
        k, v = (_repeated(x, heads, 1) for x in (k, v))
    longest_q, longest_k = (getattr(x, "_maybe_max_seqlen", None) for x in (query, key))
    seq = Ragged(starts_q.to(torch.int32), starts_k.to(torch.int32), longest_q, longest_k)
    out = attention_varlen(q, k, v, seq, mask=mask, scale=scale)
    assert isinstance(out, Tensor)  # return_lse is off
    return torch.nested.nested_tensor_from_jagged(out, starts_q).transpose(1, 2)


def _jagged(name: str, x: Any) -> tuple[Tensor, Tensor]:
    """Return values (total, heads, head_dim), int64 offsets of a jagged (batch, heads, ragged, head_dim) tensor."""
    rule = "with nested tensors query, key and value must be jagged (batch, heads, ragged, head_dim), without holes"
    if not (x.is_nested and x.layout == torch.jagged):
        raise AttentionError(f"{name} has layout {x.layout}; {rule}")
    rows = x.transpose(1, 2) if x.ndim == 4 else x
    if x.ndim != 4 or getattr(rows, "_ragged_idx", 1) != 1 or x.lengths() is not None:
        raise AttentionError(f"{name} has rank {x.ndim}; {rule}")
    return rows.values(), rows.offsets()
