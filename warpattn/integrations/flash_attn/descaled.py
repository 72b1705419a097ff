"""`q_descale`, `k_descale`, `v_descale` of flash-attn 3: factors of 8-bit tensors, fp32 (batch, heads_kv), as scales.
A factor of queries applies to all query heads that share the key head.

    equal for all sequences   a scale per head (heads,): one sequence, a stride of 0, or equal values on a CPU
    else                      a scale per token, if each token belongs to one sequence; over pages of a table factors of
                              scores and of outputs (`beside`)

flash-attn 3 reads factors of tensors of 8 bits only: without one they are ignored (`read`).
Nothing is read from a card, so factors that only happen to be equal count as different there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from warpattn.errors import AttentionError, Rules
from warpattn.inputs import kind_of
from warpattn.integrations.signature import Given
from warpattn.quantized import EIGHT_BIT, Quantized, check_scale_values
from warpattn.sequences.latent_query import LatentQuery

Rows = Tensor | Quantized  # queries, keys or values, 8-bit ones with a scale per head or token
QueryRows = Rows | LatentQuery
Spread = Callable[[Tensor, Tensor], Tensor]  # factors (batch, heads), values (..., heads, dim) -> (..., heads)
NAMES = {"q_descale": "queries", "k_descale": "keys", "v_descale": "values"}


class Factors(NamedTuple):
    """Arguments of a call: k_descale, v_descale, and qv, which must not be given with either."""

    k: Any
    v: Any
    qv: Any = None


def read(given: Given, *names: str) -> Given:
    """Return the arguments without factors if none of the tensors `names` has 8 bits."""
    if any(getattr(getattr(given, name), "dtype", None) in EIGHT_BIT for name in names):
        return given
    return Given(vars(given) | dict.fromkeys(NAMES))


def forward_only(attend: Callable[[Given], Any]) -> Callable[[Given], Any]:
    """Wrap `attend` so that for 8-bit arguments that require gradients, as in flash-attn, the forward runs and the
    backward raises."""

    @functools.wraps(attend)
    def served(given: Given) -> Any:
        inputs = {name: x for name in ("qkv", "q", "k", "v") if (x := vars(given).get(name)) is not None}
        eight_bit = all(isinstance(x, Tensor) and x.dtype in EIGHT_BIT for x in inputs.values())
        if not eight_bit or not torch.is_grad_enabled() or not any(x.requires_grad for x in inputs.values()):
            return attend(given)
        result = attend(Given(vars(given) | {name: x.detach() for name, x in inputs.items()}))
        results = result if isinstance(result, tuple) else (result,)
        results = _Untrained.apply(results, *inputs.values())
        return results if isinstance(result, tuple) else results[0]

    return served


class _Untrained(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, results: tuple[Tensor, ...], *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AttentionError("q, k and v have 8 bits; flash-attn has no backward for them: make q, k and v of 16 bits")


def of_batch(k: Tensor, v: Tensor, factors: Factors) -> tuple[Rows, Rows]:
    """Return k and v (batch, rows, heads, head_dim) with their scales."""
    if _unscaled(factors, (k, v), 4):
        return k, v
    return _descaled(k, v, factors, len(k), _along)


def of_rows(k: Tensor, v: Tensor, cu: Tensor, factors: Factors) -> tuple[Rows, Rows]:
    """Return k and v (total, heads, head_dim) of sequences that start at `cu`, with their scales."""
    if _unscaled(factors, (k, v), 3) or _unscaled(factors, (cu,), 1):
        return k, v
    return _descaled(k, v, factors, len(cu) - 1, _by_offsets(cu))


def of_pages(k: Tensor, v: Tensor, batch: int, factors: Factors) -> tuple[Rows, Rows]:
    """Return pages (num_pages, page_size, heads, head_dim) with the scales that all sequences share; see `beside`."""
    return (k, v) if _unscaled(factors, (k, v), 4) else _descaled(k, v, factors, batch, None)


def beside(factors: Factors, heads: int) -> Factors:
    """Return those factors that pages cannot have as scales, since sequences differ, for `heads` query heads: fp32
    (batch, heads)."""
    differ = [None if x is None or _shared(x) else x for x in (factors.k, factors.v)]
    return Factors(*(x if x is None else x.repeat_interleave(heads // max(x.shape[1], 1), 1) for x in differ))


def of_queries(q: Tensor, k: Any, cu: Tensor | None, factor: Any, qv: Any = None) -> Rows:
    """Return q (batch, rows, heads, head_dim), or (total, heads, head_dim) of sequences that start at `cu`, with the
    scale made of `factor`, which is per head of `k` (…, heads_kv, head_dim)."""
    alone, heads = Factors(factor, None, qv), k.shape[-2] if isinstance(k, Tensor) and k.ndim >= 3 else 0
    if _unscaled(alone, (q,), 4 if cu is None else 3) or not heads or q.shape[-2] % heads:
        return q
    if cu is not None and _unscaled(alone, (cu,), 1):
        return q
    rules, group = Rules(), q.shape[-2] // heads
    spread, batch = (_along, len(q)) if cu is None else (_by_offsets(cu), len(cu) - 1)
    scale = _scale(rules, "q_descale", q[..., ::group, :], factor, batch, spread)
    rules.done()
    return q if scale is None else Quantized(q, scale.repeat_interleave(group, -1))


def _along(factor: Tensor, x: Tensor) -> Tensor:
    """Expand factors to the tokens of a batch (batch, rows, heads, head_dim)."""
    return factor[:, None].expand(-1, x.shape[1], -1)


def _by_offsets(cu: Tensor) -> Spread:
    """Return a function that gives each token (total, heads, head_dim) the factor of its sequence by `cu`."""

    def spread(factor: Tensor, x: Tensor) -> Tensor:
        row = torch.arange(len(x), device=cu.device, dtype=cu.dtype)
        return factor[torch.bucketize(row, cu[1:], right=True).clamp(max=len(factor) - 1)]

    return spread


@overload
def changed(x: Rows, change: Callable[[Tensor], Tensor]) -> Rows: ...
@overload
def changed(x: QueryRows, change: Callable[[Tensor], Tensor]) -> QueryRows: ...
def changed(x: QueryRows, change: Callable[[Tensor], Tensor]) -> QueryRows:
    """Apply `change`, which moves or selects tokens, to values and per-token scales, or to both parts of a query."""
    if isinstance(x, LatentQuery):
        return LatentQuery(change(x.nope), change(x.rope))
    if not isinstance(x, Quantized):
        return change(x)
    return Quantized(change(x.values), x.scale if x.scale.ndim < 2 else change(x.scale))


def _unscaled(factors: Factors, values: tuple[Any, ...], rank: int) -> bool:
    """Whether there are no factors, or values have a wrong type or rank, for which the call itself raises."""
    if factors.k is None and factors.v is None:
        return True
    if factors.qv is not None:
        raise AttentionError("qv is given; with it q_descale, k_descale and v_descale must be None")
    return not all(isinstance(x, Tensor) and x.ndim == rank for x in values)


def _descaled(k: Tensor, v: Tensor, factors: Factors, batch: int, spread: Spread | None) -> tuple[Rows, Rows]:
    """Return keys and values with scales; raises AttentionError listing every broken rule of the factors."""
    rules = Rules()
    k_scale = _scale(rules, "k_descale", k, factors.k, batch, spread)
    v_scale = _scale(rules, "v_descale", v, factors.v, batch, spread)
    rules.done()
    return k if k_scale is None else Quantized(k, k_scale), v if v_scale is None else Quantized(v, v_scale)


def _scale(rules: Rules, name: str, x: Tensor, factor: Any, batch: int, spread: Spread | None) -> Tensor | None:
    """Return the scale made of a factor of `x`; None if there is none or it breaks a rule."""
    if factor is None:
        return None
    wanted = (batch, x.shape[-2])
    if x.dtype not in EIGHT_BIT:
        rules.add(f"{name} is {kind_of(factor)}", f"the {NAMES[name]} have dtype {x.dtype} and not 8 bits: pass None")
    elif not isinstance(factor, Tensor) or factor.dtype != torch.float32 or tuple(factor.shape) != wanted:
        rules.add(f"{name} is {kind_of(factor)}", f"it must be torch.float32 of shape {wanted}, (batch, heads_kv)")
    elif factor.device != x.device:
        rules.add(f"{name} is on {factor.device}", f"it must be on {x.device}")
    else:
        if factor.device.type == "cpu":
            check_scale_values(rules, name, factor)
        if _shared(factor):
            return factor[0]
        if spread is not None:
            return spread(factor, x)
    return None


def _shared(factor: Tensor) -> bool:
    """Whether all sequences have the same factors, as far as is known without reading from a card."""
    if len(factor) == 1 or (len(factor) and factor.stride(0) == 0):
        return True
    return bool(len(factor)) and factor.device.type == "cpu" and bool((factor == factor[:1]).all())
