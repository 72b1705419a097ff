"""Rules that `append_paged` and `append_slots` share, and the rotary embedding with torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from warpattn.errors import Rules, many
from warpattn.problem.memory import begins_with, overlap, overlaps_itself
from warpattn.quantized import EIGHT_BIT
from warpattn.serving.operators import WITHOUT
from warpattn.torch_modes import without_autocast

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_heads(rules: Rules, new: dict[str, Tensor], pages: dict[str, Tensor]) -> None:
    """Check heads and head dims of `new` tokens and their `pages`, keys first."""
    first, *_ = new
    heads = new[first].shape[-2]
    for name, x in (*list(new.items())[1:], *pages.items()):
        what = f"{name} has {many(x.shape[-2], 'head')}"
        rules.require(x.shape[-2] == heads, what, f"it must have the heads of {first}, {heads}")
    for (name, x), tokens in zip(pages.items(), new.values(), strict=True):
        what = f"{name} has head_dim {x.shape[3]}"
        rules.require(x.shape[3] == tokens.shape[-1], what, f"it must be that of the new tokens, {tokens.shape[-1]}")
    k_pages, *others = pages.values()
    for v_pages in others:
        what = f"v_pages has {many(v_pages.shape[0], 'page')} of {many(v_pages.shape[1], 'key')}"
        rule = f"it must match k_pages, {many(k_pages.shape[0], 'page')} of {many(k_pages.shape[1], 'key')}"
        rules.require(k_pages.shape[:2] == v_pages.shape[:2], what, rule)
    rules.require(k_pages.shape[1] > 0, f"k_pages has shape {tuple(k_pages.shape)}", "a page must hold a key")


def check_angles(rules: Rules, k: Tensor, k_name: str, cos: Tensor | None, sin: Tensor | None) -> bool:
    """Check cos and sin for the new keys; True if they are tensors or None."""
    for name, given, other in (("cos", cos, "sin"), ("sin", sin, "cos")):
        present = (sin if name == "cos" else cos) is not None
        rules.require(given is not None or not present, f"{name} is None", f"it must be given together with {other}")
    if cos is None or sin is None:
        return True
    if not all([rules.tensor(name, x, "positions", "half") for name, x in (("cos", cos), ("sin", sin))]):
        return False
    rules.require(cos.shape == sin.shape, f"sin has shape {tuple(sin.shape)}", f"it must be cos's, {tuple(cos.shape)}")
    half = k.shape[-1] // 2
    rules.require(
        1 <= cos.shape[1] <= half, f"cos has {many(cos.shape[1], 'column')}", f"there must be 1 to {half}, head_dim/2"
    )
    for name, x in (("cos", cos), ("sin", sin)):
        allowed = x.dtype in (torch.float32, k.dtype) and x.dtype == cos.dtype
        rule = f"cos and sin must be fp32 or both of the dtype of {k_name}"
        rules.require(allowed, f"{name} has dtype {x.dtype}", rule)
    return True


def check_places(rules: Rules, copied: dict[str, Tensor], others: dict[str, Tensor], function: str) -> None:
    """Check dtypes, devices and strides of `copied` tensors (new rows and pages, new keys first) and of `others`."""
    first, *_ = copied
    new = copied[first]
    rules.require(new.dtype in DTYPES, f"{first} has dtype {new.dtype}", "it must be fp16, bf16 or fp32")
    for name, x in copied.items():
        stored = name.endswith("_pages") and x.dtype in EIGHT_BIT and x.dtype == copied["k_pages"].dtype
        rule = f"it must be that of {first}, {new.dtype}" + (", or of 8 bits" if name.endswith("_pages") else "")
        rules.require(x.dtype == new.dtype or stored, f"{name} has dtype {x.dtype}", rule)
    for name, x in (copied | others).items():
        what = f"{name} is on {x.device}"
        rules.require(x.device == new.device, what, f"it must be on the device of {first}, {new.device}")
        packed = x.stride(-1) == 1 or x.shape[-1] <= 1
        rules.require(packed, f"{name} has strides {x.stride()}", "the last stride must be 1")
        grad = x.requires_grad and torch.is_grad_enabled()
        rules.require(not grad, f"{name} requires a gradient", f"{function} has none; {WITHOUT}")


def check_memory(rules: Rules, new: dict[str, Tensor], pages: dict[str, Tensor], rotates: bool) -> None:
    """Check memory, keys first: no two elements of a cache share a place, none is shared with `new`. Values may be the
    first columns of keys if new ones are, too, unless the call rotates keys. Repeated calls on a card rely on the first
    call's check."""
    for name, x in pages.items():
        what = f"{name} has shape {tuple(x.shape)} and strides {x.stride()}"
        rules.require(not overlaps_itself(x), what, "each of its elements must have its own place in memory")
        for other, read in new.items():
            what = f"{name} starts at {x.data_ptr()} and {other} at {read.data_ptr()}"
            rules.require(not overlap(x, read), what, f"{name} must not share memory with {other}, which is read")
    if len(pages) < 2:
        return
    (k_pages, v_pages), (k, v) = pages.values(), new.values()
    latent = k.shape[:-1] == v.shape[:-1] and begins_with(k_pages, v_pages) and begins_with(k, v)
    if not overlap(k_pages, v_pages):
        return
    if latent:
        rule = "values are written there without a rotation: rotate new keys and values before the call"
        rules.require(not rotates, "v_pages are the first columns of k_pages and cos is given", rule)
    else:
        what = f"k_pages start at {k_pages.data_ptr()} and v_pages at {v_pages.data_ptr()}"
        rules.add(what, "they must not share memory, unless values are the first columns of keys, new ones as well")


def rotated(k: Tensor, position: Tensor, angles: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    """Apply the rotary embedding (Su et al., arXiv 2104.09864) in fp32 to keys (…, heads, dim) at positions (…)."""
    cos, sin = (x.float()[position][..., None, :] for x in angles)  # [..., 1, R/2]
    turned = 2 * cos.shape[-1]
    x = k[..., :turned].float()
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    parts = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.stack(parts, dim=-1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)
    with without_autocast(k.device):
        return torch.cat([joined.to(k.dtype), k[..., turned:]], dim=-1)
