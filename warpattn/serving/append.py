"""append_paged: new keys and values into the pages of a cache, on the CPU with torch, on a card with a kernel.

lengths[b] = 6, two new tokens, pages of 4          page 7 [ . . . . ]   page 2 [ a b . . ]
block_table[b] = (7, 2, …)                          positions 4 and 5 ─────────────┘
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from warpattn.errors import AttentionError, Rules
from warpattn.kernels.cache.launch import append_launches
from warpattn.problem.backends import NEEDS, chip_of
from warpattn.problem.operands import described
from warpattn.runtime import cuda
from warpattn.runtime.bound_launches import BoundLaunches, launch_all
from warpattn.sequences import PagedKV

__all__ = ["append_paged"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
KEPT = 256  # launches at most

# k_pages, v_pages, block_table, lengths, k_new, v_new, cos, sin
Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]

_known: dict[Hashable, BoundLaunches] = {}


def append_paged(
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
) -> None:
    """Write the newest keys and values of each sequence into its pages, in place.

    k_pages (num_pages, page_size, Hkv, D), v_pages (num_pages, page_size, Hkv, Dv), block_table int32 (B, max_pages),
    lengths int32 (B,): as in `PagedKV`, so the lengths include the new tokens and one tensor serves this call and
    `attention_paged`. k_new (B, T, Hkv, D), v_new (B, T, Hkv, Dv): token t of sequence b goes to position
    lengths[b] - T + t; tokens whose position is below 0 are left out, so a length of 0 writes nothing. fp16, bf16 or
    fp32, the last stride of every tensor is 1.

    cos, sin (positions, R / 2), same dtype as k_new or fp32: rotary embedding of the first R elements of each new key,
    row p for position p. interleaved: pairs (0, 1), (2, 3), …; otherwise (0, R/2), (1, R/2 + 1), …

    On a card nothing is read back: pages that are not in the cache and positions that the table or `cos` do not hold
    are the caller's promise, and such tokens are not written. Raises AttentionError listing every broken rule.
    """
    tensors = (k_pages, v_pages, block_table, lengths, k_new, v_new, cos, sin)
    if _launched_again(tensors, interleaved):
        return
    kv = PagedKV(k_pages, v_pages, block_table, lengths)
    angles = None if cos is None or sin is None else (cos, sin)
    rules = Rules()
    rules.flag("interleaved", interleaved)
    if _check_shapes(rules, kv, k_new, v_new):
        _check_angles(rules, k_new, cos, sin)
        _check_places(rules, kv, k_new, v_new, angles)
    rules.done()
    if k_new.numel() == 0:
        return
    if k_new.device.type == "cpu":
        _check_values(rules, kv, k_new, angles)
        rules.done()
        _append(kv, k_new if angles is None else _rotated(kv, k_new, angles, interleaved), v_new)
    else:
        _launch(tensors, interleaved)


def _check_shapes(rules: Rules, kv: PagedKV, k_new: Tensor, v_new: Tensor) -> bool:
    """Rules of ranks and sizes; True if all ranks are right."""
    axes = ("batch", "tokens", "heads", "head_dim")
    ranks = [rules.tensor(name, x, *axes) for name, x in (("k_new", k_new), ("v_new", v_new))]
    pages = ("num_pages", "page_size", "heads", "head_dim")
    ranks += [rules.tensor(name, x, *pages) for name, x in (("k_pages", kv.k_pages), ("v_pages", kv.v_pages))]
    ranks.append(rules.tensor("block_table", kv.block_table, "batch", "max_pages"))
    ranks.append(rules.tensor("lengths", kv.lengths, "batch"))
    if not all(ranks):
        return False
    batch, tokens, heads, _ = k_new.shape
    for name, found in (("v_new", len(v_new)), ("block_table", len(kv.block_table)), ("lengths", len(kv.lengths))):
        rules.require(found == batch, f"{name} has batch {found}", f"it must have the batch of k_new, {batch}")
    what = f"v_new has {v_new.shape[1]} tokens"
    rules.require(v_new.shape[1] == tokens, what, f"it must have as many as k_new, {tokens}")
    for name, x in (("v_new", v_new), ("k_pages", kv.k_pages), ("v_pages", kv.v_pages)):
        what = f"{name} has {x.shape[2]} heads"
        rules.require(x.shape[2] == heads, what, f"it must have the heads of k_new, {heads}")
    for name, x, new in (("k_pages", kv.k_pages, k_new), ("v_pages", kv.v_pages, v_new)):
        what = f"{name} has head_dim {x.shape[3]}"
        rules.require(x.shape[3] == new.shape[3], what, f"it must be that of the new tokens, {new.shape[3]}")
    same = kv.k_pages.shape[:2] == kv.v_pages.shape[:2]
    what = f"v_pages has {kv.v_pages.shape[0]} pages of {kv.v_pages.shape[1]} keys"
    rule = f"it must match k_pages, {kv.k_pages.shape[0]} pages of {kv.k_pages.shape[1]} keys"
    rules.require(same, what, rule)
    rules.require(kv.k_pages.shape[1] > 0, f"k_pages has shape {tuple(kv.k_pages.shape)}", "a page must hold a key")
    return True


def _check_angles(rules: Rules, k_new: Tensor, cos: Tensor | None, sin: Tensor | None) -> None:
    """Rules of cos and sin."""
    for name, given, other in (("cos", cos, "sin"), ("sin", sin, "cos")):
        present = (sin if name == "cos" else cos) is not None
        rules.require(given is not None or not present, f"{name} is None", f"it must be given together with {other}")
    if cos is None or sin is None:
        return
    if not all([rules.tensor(name, x, "positions", "half") for name, x in (("cos", cos), ("sin", sin))]):
        return
    rules.require(cos.shape == sin.shape, f"sin has shape {tuple(sin.shape)}", f"it must be cos's, {tuple(cos.shape)}")
    half = k_new.shape[3] // 2
    rules.require(
        1 <= cos.shape[1] <= half, f"cos has {cos.shape[1]} columns", f"there must be 1 to {half}, head_dim/2"
    )
    for name, x in (("cos", cos), ("sin", sin)):
        allowed = x.dtype in (torch.float32, k_new.dtype) and x.dtype == cos.dtype
        rules.require(allowed, f"{name} has dtype {x.dtype}", "cos and sin must be fp32 or both of the dtype of k_new")


def _check_places(
    rules: Rules, kv: PagedKV, k_new: Tensor, v_new: Tensor, angles: tuple[Tensor, Tensor] | None
) -> None:
    """Rules of dtypes, devices and strides."""
    rules.require(k_new.dtype in DTYPES, f"k_new has dtype {k_new.dtype}", "it must be fp16, bf16 or fp32")
    named = {"k_new": k_new, "v_new": v_new, "k_pages": kv.k_pages, "v_pages": kv.v_pages}
    for name, x in named.items():
        rules.require(x.dtype == k_new.dtype, f"{name} has dtype {x.dtype}", f"it must be that of k_new, {k_new.dtype}")
    named |= {"block_table": kv.block_table, "lengths": kv.lengths}
    for name in ("block_table", "lengths"):
        rules.require(
            named[name].dtype == torch.int32, f"{name} has dtype {named[name].dtype}", "it must be torch.int32"
        )
    if angles is not None:
        named |= {"cos": angles[0], "sin": angles[1]}
    for name, x in named.items():
        what = f"{name} is on {x.device}"
        rules.require(x.device == k_new.device, what, f"it must be on the device of k_new, {k_new.device}")
        packed = x.stride(-1) == 1 or x.shape[-1] <= 1
        rules.require(packed, f"{name} has strides {x.stride()}", "the last stride must be 1")
        grad = x.requires_grad and torch.is_grad_enabled()
        rules.require(not grad, f"{name} requires a gradient", "append_paged has none; call it under torch.no_grad()")


def _check_values(rules: Rules, kv: PagedKV, k_new: Tensor, angles: tuple[Tensor, Tensor] | None) -> None:
    """Rules of lengths and pages, where reading them costs nothing."""
    tokens, size = k_new.shape[1], kv.k_pages.shape[1]
    capacity = kv.block_table.shape[1] * size
    for b, length in enumerate(kv.lengths.tolist()):
        rule = f"a length must be within 0 .. {capacity}, the keys that {kv.block_table.shape[1]} pages hold"
        if not rules.require(0 <= length <= capacity, f"lengths[{b}] is {length}", rule):
            continue
        if angles is not None:
            what = f"cos has {len(angles[0])} rows"
            rules.require(length <= len(angles[0]), what, f"position {length - 1} of sequence {b} must be in it")
        for slot in range(max(length - tokens, 0) // size, -(-length // size)):
            page = int(kv.block_table[b, slot])
            rule = f"a page in use must be within 0 .. {len(kv.k_pages) - 1}, the pages of the cache"
            rules.require(0 <= page < len(kv.k_pages), f"block_table[{b}, {slot}] is {page}", rule)


def _positions(kv: PagedKV, tokens: int) -> Tensor:
    """Position (B, T) of every new token; below 0 for those that are left out."""
    return kv.lengths[:, None].long() - tokens + torch.arange(tokens, device=kv.lengths.device)


def _append(kv: PagedKV, k_new: Tensor, v_new: Tensor) -> None:
    """The same with torch alone."""
    position = _positions(kv, k_new.shape[1])
    there = position >= 0
    size = kv.k_pages.shape[1]
    page = kv.block_table.long().gather(1, position.clamp_min(0) // size)
    for pages, new in ((kv.k_pages, k_new), (kv.v_pages, v_new)):
        pages[page[there], position[there] % size] = new[there]


def _rotated(kv: PagedKV, k_new: Tensor, angles: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    """New keys after the rotary embedding, computed in fp32."""
    position = _positions(kv, k_new.shape[1]).clamp_min(0)
    cos, sin = (x.float()[position][:, :, None] for x in angles)  # [B, T, 1, R/2]
    turned = 2 * cos.shape[-1]
    x = k_new[..., :turned].float()
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    parts = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.stack(parts, dim=-1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)
    return torch.cat([joined.to(k_new.dtype), k_new[..., turned:]], dim=-1)


def _launch(tensors: Tensors, interleaved: bool) -> None:
    """The kernel, on torch's current stream; NVIDIA's are kept for the next call like this one."""
    *cache, k_new, v_new, cos, sin = tensors
    chip = chip_of(k_new.device)
    if chip.arch is None:
        what = f"k_new is on {k_new.device}" + (f", {chip.words}" if chip.words else "")
        raise AttentionError(f"{what}; append_paged needs {' or '.join(NEEDS.values())}, or the CPU")
    device = k_new.get_device()
    angles = None if cos is None or sin is None else (cos, sin)
    with torch.cuda.device(device):
        launches = append_launches(chip.arch, PagedKV(*cache), k_new, v_new, angles, interleaved)
        bound = launch_all(launches, device)
    if bound is None:  # AMD's launches are not kept
        return
    try:
        bound.follow(tensors)
    except LookupError:  # one tensor is given for two
        return
    if len(_known) >= KEPT:
        _known.clear()
    _known[_key(tensors, interleaved)] = bound


def _launched_again(tensors: Tensors, interleaved: bool) -> bool:
    """Launch if a call like this one has been checked and launched before; False if not, or if it is in any way
    unusual."""
    try:
        bound = _known.get(_key(tensors, interleaved))
    except (AttributeError, TypeError):
        return False
    if bound is None or type(interleaved) is not bool or cuda.current_device() != bound.device:
        return False
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return False
    bound(_addresses(tensors), ())
    return True


def _key(tensors: Tensors, interleaved: bool) -> Hashable:
    """All that the rules and the launch have read on a card, but for gradients."""
    return (interleaved, *[None if x is None else described(x) for x in tensors])


def _addresses(tensors: Tensors) -> tuple[int, ...]:
    return tuple([0 if x is None else x.data_ptr() for x in tensors])
