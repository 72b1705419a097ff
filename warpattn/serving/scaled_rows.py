"""8-bit rows of a cache: the rules of their scales, and writing them with torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from warpattn.errors import Rules
from warpattn.problem.memory import overlap, overlaps_itself, writing
from warpattn.quantized import EIGHT_BIT, check_scale, check_scale_values, granularity, quantize
from warpattn.serving.operators import WITHOUT

STATIC = (None, "tensor", "head")


def check_scales(rules: Rules, scales: dict[str, Tensor | None], tensors: dict[str, Tensor]) -> None:
    """Check the scales of keys' and values' pages. tensors: the new tokens and the pages."""
    for name, scale in scales.items():
        pages_name = f"{name[0]}_pages"
        _check_scale_of(rules, name, scale, pages_name, tensors.get(pages_name))
    if rules.broken:
        return
    k_pages, v_pages = tensors["k_pages"], tensors.get("v_pages")
    if v_pages is not None and overlap(k_pages, v_pages):  # the first columns of keys, see `check_memory`
        rule = "rows are written by both: k_scale and v_scale must be equal, per tensor or head"
        fine = _is_one_scale(scales["k_scale"], scales["v_scale"], k_pages.device.type == "cpu")
        rules.require(fine, "v_pages are the first columns of k_pages and have another scale", rule)
    written = {name: x for name, x in scales.items() if x is not None and x.ndim > 1}  # computed from each row
    others = tensors | {name: x for name, x in scales.items() if x is not None}
    for name, scale in written.items():
        what = f"{name} has shape {tuple(scale.shape)} and strides {scale.stride()}"
        rules.require(not overlaps_itself(scale), what, "each of its elements must have its own place in memory")
        grad = scale.requires_grad and torch.is_grad_enabled()
        rules.require(not grad, f"{name} requires a gradient", f"new tokens' scales are written to it; {WITHOUT}")
        for other, x in others.items():
            what = f"{name} starts at {scale.data_ptr()} and {other} at {x.data_ptr()}"
            shared = other != name and overlap(scale, x)
            rules.require(not shared, what, f"{name} is written and must not share memory with {other}")


def _is_one_scale(k_scale: Tensor | None, v_scale: Tensor | None, read_values: bool) -> bool:
    """Whether two scales of pages are the same given ones; without `read_values` as far as their shapes say."""
    if any(scale is not None and scale.ndim > 1 for scale in (k_scale, v_scale)):
        return False
    if not read_values:
        return (k_scale is None) == (v_scale is None)
    k_one, v_one = (torch.ones((), device="cpu") if scale is None else scale for scale in (k_scale, v_scale))
    return bool((k_one == v_one).all())


def _check_scale_of(rules: Rules, name: str, scale: Tensor | None, pages_name: str, pages: Tensor | None) -> None:
    """Check the scale of pages; on the CPU also its values, unless they are computed for each row."""
    if scale is None:
        return
    if pages is None or pages.dtype not in EIGHT_BIT:
        what = "there are none" if pages is None else f"{pages_name} has dtype {pages.dtype}"
        rules.add(f"{name} is given", f"{what}, and scales belong to pages of 8 bits")
        return
    if not check_scale(rules, name, scale, pages_name, pages.shape):
        return
    rules.require(scale.device == pages.device, f"{name} is on {scale.device}", f"it must be on {pages.device}")
    if pages.device.type == "cpu" and granularity(scale, pages.shape) in STATIC:
        check_scale_values(rules, name, scale)


def write_rows(pages: Tensor, at: tuple[Tensor, Tensor], x: Tensor, scale: Tensor | None) -> None:
    """Write rows x (n, heads, dim) to (page, row) of a cache; 8-bit rows are divided by their scale, which is computed
    and written if tokens have their own."""
    if pages.dtype not in EIGHT_BIT:
        _write(pages, at, x)
        return
    per = granularity(scale, pages.shape)
    if per in STATIC:
        given = scale if scale is not None else x.new_ones(()).float()
        _write(pages, at, quantize(x, pages.dtype, scale=given).values)
        return
    made = quantize(x, pages.dtype, per=per if per is not None else "token")
    assert scale is not None
    _write(pages, at, made.values)
    _write(scale, at, made.scale.reshape(scale[at].shape))


def _write(target: Tensor, at: tuple[Tensor, Tensor], rows: Tensor) -> None:
    with writing(target):
        target[at] = rows
