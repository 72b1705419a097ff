"""8-bit rows of a cache: the rules of their scales, and writing them with torch operations."""

from __future__ import annotations

from torch import Tensor

from warpattn.errors import Rules
from warpattn.quantized import EIGHT_BIT, check_scale, check_scale_values, granularity, quantize

STATIC = (None, "tensor", "head")


def check_scale_of(rules: Rules, name: str, scale: Tensor | None, pages_name: str, pages: Tensor | None) -> None:
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
        pages[at] = x
        return
    per = granularity(scale, pages.shape)
    if per in STATIC:
        pages[at] = quantize(x, pages.dtype, scale=scale if scale is not None else x.new_ones(()).float()).values
        return
    made = quantize(x, pages.dtype, per=per if per is not None else "token")
    assert scale is not None
    pages[at] = made.values
    scale[at] = made.scale.reshape(scale[at].shape)
