"""Shared code of FlashInfer's functions: a layer's mask, score and scale, layouts of keys, LSEs in base 2."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpattn.errors import AttentionError, Rules
from warpattn.inputs import is_tensor, kind_of, number
from warpattn.integrations.signature import Given, with_names
from warpattn.masks import Causal, Full, Mask, SlidingWindow
from warpattn.quantized import EIGHT_BIT, Quantized, result_dtype
from warpattn.scores import Score, SoftCap
from warpattn.serving.filled import fill, require_own

LAYOUTS = ("NHD", "HND")
LOG2_E = math.log2(math.e)
SMALLEST = 2.0**-149  # of the positive numbers of fp32
BLOCK_SCALES = "scales of blocks of columns are those of 4-bit caches, which are not served"
ROTATED = "positions are not encoded here: rotate q and k before the call"
SCALES = ("q_scale", "k_scale", "v_scale")
NAMES = {"seq.cu_q": "qo_indptr", "seq.cu_k": "kv_indptr"}
NAMES_OF_PAGES = NAMES | {
    "kv.k_pages": "paged_kv_cache[0]",
    "kv.v_pages": "paged_kv_cache[1]",
    "kv.block_table": "the table of planned pages",
    "kv.lengths": "the planned number of keys",
}


def all_of(*steps: Callable[[], Any]) -> list[Any]:
    """Return the results of independent steps, or raise all of their errors as one."""
    rules = Rules()
    results = [_attempted(rules, step) for step in steps]
    rules.done()
    return results


def _attempted(rules: Rules, step: Callable[[], Any]) -> Any:
    try:
        return step()
    except AttentionError as error:
        rules.broken += [reason for reason in error.reasons if reason not in rules.broken]


class Layer(NamedTuple):
    """Mask, score and scale of a call."""

    mask: Mask
    score: Score | None
    scale: float

    @staticmethod
    def of(given: Given, dim: int, causal: bool) -> Layer:
        """Make a layer from the arguments that all functions have. A window counts the keys before a query's own."""
        score, _ = all_of(lambda: _score(given.logits_soft_cap), lambda: _check_positions(given.pos_encoding_mode))
        window = given.window_left
        mask: Mask = Causal() if causal else Full()
        if window is not None and window >= 0:
            mask = SlidingWindow(window + 1, right=0 if causal else None)
        scale = None if given.sm_scale is None else number(given.sm_scale)
        return Layer(mask, score, max(dim, 1) ** -0.5 if scale is None else scale)

    def tail(self) -> dict[str, Any]:
        """The keywords of `attention`."""
        return {"mask": self.mask, "score": self.score, "scale": self.scale, "return_lse": True}


@with_names({"cap": "logits_soft_cap"})
def _score(cap: float | None) -> Score | None:
    return None if cap is None or cap <= 0 else SoftCap(cap)  # which refuses NaN


def _check_positions(mode: object) -> None:
    if not isinstance(mode, str) or mode != "NONE":
        raise AttentionError(f"pos_encoding_mode is {kind_of(mode)}; {ROTATED}")


def factor_of(given: Given, k: Any, v: Any) -> float:
    """Return the product of a call's factors for 16-bit q and `k`; `finished` applies that for 16-bit `v`."""
    rules, product, narrow = Rules(), 1.0, [getattr(x, "dtype", None) in EIGHT_BIT for x in (given.q, k, v)]
    for name in [name for name, eight_bit in zip(SCALES, narrow, strict=True) if not eight_bit]:
        factor = vars(given).get(name)
        alone = factor.reshape(()) if is_tensor(factor) and factor.numel() == 1 else None
        if alone is not None and name == "v_scale":
            continue
        value = number(factor if alone is None else alone)
        if factor is not None and value is None:
            rule = "it must be a number: scales of heads belong to keys and values of 8 bits"
            rules.add(f"{name} is {kind_of(factor)}", rule)
        product *= 1.0 if value is None or name == "v_scale" else value
    rules.done()
    return product


def eight_bit_scale(name: str, given: Given, x: Any) -> Tensor | None:
    """Return the scale of 8-bit x (…, heads, dim) from the argument `name`: a number, a tensor of one element or of one
    per head. Nothing is read from a card."""
    factor = vars(given).get(name)
    if factor is None or getattr(x, "dtype", None) not in EIGHT_BIT:
        return None
    if not is_tensor(factor):
        value = number(factor)
        if value is None:
            rule = "it must be a number, or a tensor of one or of one for each head"
            raise AttentionError(f"{name} is {kind_of(factor)}; {rule}")
        if not SMALLEST <= value <= torch.finfo(torch.float32).max:
            raise AttentionError(f"{name} is {value}; a scale must be positive and finite, in fp32")
        return torch.full((), float(value), dtype=torch.float32, device=x.device)
    if factor.numel() != 1 and tuple(factor.shape) != (x.shape[-2],):
        rule = f"it must have one element, or shape ({x.shape[-2]},), one for each head"
        raise AttentionError(f"{name} has shape {tuple(factor.shape)}; {rule}")
    return factor.reshape(()) if factor.numel() == 1 else factor


def with_scale(name: str, given: Given, x: Any) -> Any:
    """Return x, with the scale of argument `name` if it has 8 bits."""
    scale = eight_bit_scale(name, given, x)
    return x if scale is None else Quantized(x, scale)


def with_scales(given: Given, q: Any, k: Any, v: Any) -> list[Any]:
    """Return queries, keys and values, 8-bit ones with the call's scales."""
    named = zip(SCALES, (q, k, v), strict=True)
    return all_of(*(partial(with_scale, name, given, x) for name, x in named))


def check_output(name: str, asked: object, q: Tensor) -> None:
    """Check that outputs have the dtype, or the dtype of the name, that the argument `name` asks for."""
    dtype = getattr(torch, asked, asked) if isinstance(asked, str) else asked
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise AttentionError(f"{name} is {kind_of(asked)}; it must be a dtype of torch, or its name")
    if dtype not in (None, result_dtype(q.dtype)):
        rule = "outputs have the dtype of q, and bf16 of queries of 8 bits"
        raise AttentionError(f"{name} is {dtype} and q has dtype {q.dtype}; {rule}")


def of_layout(layout: object) -> str:
    """Return a layout's name; raises AttentionError for another one."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise AttentionError(f"kv_layout is {kind_of(layout)}; it must be one of {', '.join(LAYOUTS)}")
    return str(layout)


def heads_last(x: Tensor, layout: str) -> Tensor:
    """Return keys or values as a view (…, rows, heads, dim)."""
    return x if layout == "NHD" else x.transpose(-2, -3)


def in_base_2(lse: Tensor) -> Tensor:
    """Convert a natural LSE to base 2. Finite numbers stay finite: -inf would mean that no key was seen."""
    found, most = lse * LOG2_E, torch.finfo(lse.dtype).max
    return torch.where(lse.isfinite(), found.clamp(-most, most), found)


def in_base_e(lse: Tensor) -> Tensor:
    """Convert an LSE in base 2 to a natural one."""
    return lse / LOG2_E


def finished(given: Given, out: Tensor, lse: Tensor, v: Any = None) -> Tensor | tuple[Tensor, Tensor]:
    """Make a call's result from out (rows, heads, dim) and a natural lse (heads, rows): FlashInfer's lse is in base 2,
    (rows, heads), unless `lse_base` and `lse_layout` say otherwise. Outputs of 16-bit values `v` are multiplied by
    v_scale."""
    asked = vars(given)
    base, layout = asked.get("lse_base", "log2"), asked.get("lse_layout", "NH")
    known = isinstance(base, str) and isinstance(layout, str) and base in ("log2", "ln") and layout in ("NH", "HN")
    if not known:
        rule = "they must be log2 or ln, and NH or HN"
        raise AttentionError(f"lse_base is {kind_of(base)} and lse_layout {kind_of(layout)}; {rule}")
    factor = None if v is None or getattr(v, "dtype", None) in EIGHT_BIT else asked.get("v_scale")
    if factor is not None:
        factor = factor.reshape(()) if isinstance(factor, Tensor) else factor
        out = out * factor if asked.get("out") is None else out.mul_(factor)
    if not given.return_lse:
        return out
    found = lse if base == "ln" else in_base_2(lse)
    found = found if layout == "HN" else found.transpose(0, 1).contiguous()
    target = asked.get("lse")
    if target is None:
        return out, found
    rules, shape = Rules(), tuple(found.shape)
    rules.require(target.shape == shape, f"lse has shape {tuple(target.shape)}", f"it must be {shape}")
    rules.require(target.dtype == found.dtype, f"lse has dtype {target.dtype}", f"it must be {found.dtype}")
    rule = "there is no gradient through it; leave it out or use torch.no_grad()"
    rules.require(not found.requires_grad, "lse is given", rule)
    rules.done()
    if not torch.compiler.is_compiling():
        require_own({"lse": target}, _read(asked) | {"out": out})
    return out, fill(target, found)


def _read(asked: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a call but its lse, those of pairs by name and number."""
    given = {name: value for name, value in asked.items() if name != "lse"}
    pairs = {name: value for name, value in given.items() if isinstance(value, list | tuple)}
    every = given | {f"{name}[{i}]": x for name, pair in pairs.items() for i, x in enumerate(pair)}
    return {name: x for name, x in every.items() if isinstance(x, Tensor)}
