"""append_slots: writes new keys and values into the slots of a paged cache, as engines address it.

page size 4, slots (30, 31, -1, 8)        page 7 [ . . a b ]   page 2 [ d . . . ]        -1 is padding
"""

from __future__ import annotations

import torch
from torch import Tensor

from warpattn.errors import Rules, many
from warpattn.kernels.cache.launch import NewRows, slot_launches
from warpattn.problem.operands import MAX_INDEX
from warpattn.runtime.repeated_calls import RepeatedCalls
from warpattn.serving.new_tokens import check_angles, check_heads, check_memory, check_places, rotated
from warpattn.serving.operators import operator_of
from warpattn.serving.scaled_rows import check_scales, write_rows
from warpattn.torch_modes import is_recorded

INDEX_DTYPES = (torch.int32, torch.int64)

_TENSORS = ("k_pages", "v_pages", "k", "v", "slot_mapping", "positions", "cos", "sin", "k_scale", "v_scale")
_calls = RepeatedCalls("append_slots", 4, _TENSORS)


def append_slots(
    k: Tensor,
    v: Tensor | None,
    k_pages: Tensor,
    v_pages: Tensor | None,
    slot_mapping: Tensor,
    *,
    positions: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write new keys and values into the slots of a paged cache, in place, with one launch.

    k (tokens, Hkv, D), v (tokens, Hkv, Dv); k_pages (num_pages, page_size, Hkv, D), v_pages (num_pages, page_size, Hkv,
    Dv): views with any strides, also of one tensor. v and v_pages may both be None: one tensor, as a latent cache has.
    slot_mapping (slots,) int32 or int64: token t goes to row slot % page_size of page slot // page_size; -1 is padding
    and writes nothing. There may be fewer slots than tokens; tokens beyond them are padding, too. Two tokens must not
    have one slot. fp16, bf16 or fp32, the last stride of every tensor is 1; a cache has fewer than 2^31 slots.

    cos, sin (rows, R / 2), same dtype as k or fp32, and positions (tokens,) int32 or int64: rotary embedding of the
    first R elements of each key, row p for position p. interleaved: pairs (0, 1), (2, 3), …; otherwise (0, R/2),
    (1, R/2 + 1), …

    Pages may have 8 bits, with k_scale, v_scale fp32 as in `PagedKV` or None for 1: new elements are divided by their
    scale, saturated and rounded to nearest. A scale of shape () or (Hkv,) is given; others, of (num_pages, page_size,
    Hkv) or (num_pages, page_size, Hkv, blocks), are computed from each new row and written.

    On a card nothing is read back, so a captured graph serves other slots, too: tokens whose slot is not in the cache
    are not written, and the caller promises valid positions. Raises AttentionError listing every broken rule.
    """
    if is_recorded():
        rotation = {"positions": positions, "cos": cos, "sin": sin, "interleaved": interleaved}
        _operator(k, v, k_pages, v_pages, slot_mapping, **rotation, k_scale=k_scale, v_scale=v_scale)
        return
    tensors = (k_pages, v_pages, k, v, slot_mapping, positions, cos, sin, k_scale, v_scale)
    if _calls.launched_again(tensors, interleaved):
        return
    angles = None if cos is None or sin is None else (cos, sin)
    rules = Rules()
    rules.flag("interleaved", interleaved)
    new, pages = {"k": k}, {"k_pages": k_pages}
    if v is not None or v_pages is not None:
        new["v"], pages["v_pages"] = v, v_pages  # type: ignore[assignment]
    if _check_shapes(rules, new, pages, slot_mapping) and check_angles(rules, k, "k", cos, sin):
        ranked = _check_positions(rules, slot_mapping, positions, angles)
        others = {"slot_mapping": slot_mapping} | ({} if positions is None or not ranked else {"positions": positions})
        check_places(rules, new | pages, others | dict(zip(("cos", "sin"), angles or (), strict=False)), "append_slots")
        check_memory(rules, new, pages, angles is not None)
        check_scales(rules, {"k_scale": k_scale, "v_scale": v_scale}, new | pages)
    rules.done()
    count = len(slot_mapping)
    if count == 0 or k[:count].numel() == 0:
        return
    if k.device.type == "cpu":
        _check_values(rules, k_pages, slot_mapping, positions, cos)
        rules.done()
        given = NewRows(k, v, angles, interleaved, (k_scale, v_scale))
        _append(given, pages, slot_mapping, positions)
    else:
        _launch(tensors, interleaved)


_operator = operator_of(append_slots)


def _check_shapes(rules: Rules, new: dict[str, Tensor], pages: dict[str, Tensor], slots: Tensor) -> bool:
    """Check ranks and sizes; True if all ranks are right."""
    ranks = [rules.tensor(name, x, "tokens", "heads", "head_dim") for name, x in new.items()]
    axes = ("num_pages", "page_size", "heads", "head_dim")
    ranks += [rules.tensor(name, x, *axes) for name, x in pages.items()]
    ranks.append(rules.tensor("slot_mapping", slots, "slots"))
    if not all(ranks):
        return False
    for name, x in new.items():
        rule = f"it must have at least one for each of {many(len(slots), 'slot')}"
        rules.require(len(x) >= len(slots), f"{name} has {many(len(x), 'token')}", rule)
    check_heads(rules, new, pages)
    number = pages["k_pages"].shape[0] * pages["k_pages"].shape[1]
    rules.require(number <= MAX_INDEX, f"k_pages has {number} slots", f"a cache has at most {MAX_INDEX}")
    return True


def _check_positions(
    rules: Rules, slots: Tensor, positions: Tensor | None, angles: tuple[Tensor, Tensor] | None
) -> bool:
    """Check slots and positions; True if positions are None or have the right rank."""
    rule = "it must be torch.int32 or torch.int64"
    rules.require(slots.dtype in INDEX_DTYPES, f"slot_mapping has dtype {slots.dtype}", rule)
    if positions is None:
        rules.require(angles is None, "positions is None", "cos and sin need the position of every token")
        return True
    rules.require(angles is not None, "positions is given", "without cos and sin it has no use")
    ranked = rules.tensor("positions", positions, "tokens")
    if ranked:
        rules.require(positions.dtype in INDEX_DTYPES, f"positions has dtype {positions.dtype}", rule)
        what = f"positions has {many(len(positions), 'element')}"
        rules.require(len(positions) >= len(slots), what, f"it must have at least {len(slots)}, one a slot")
    return ranked


def _check_values(
    rules: Rules, k_pages: Tensor, slots: Tensor, positions: Tensor | None, cos: Tensor | None
) -> None:
    """Check the values of slots and positions, on the CPU only, where reading them costs nothing."""
    number, written = k_pages.shape[0] * k_pages.shape[1], {}
    for t, slot in enumerate(slots.tolist()):
        rule = f"a slot must be -1 or within 0 .. {number - 1}, the rows of the cache"
        if not rules.require(-1 <= slot < number, f"slot_mapping[{t}] is {slot}", rule) or slot < 0:
            continue
        what = f"slot_mapping[{t}] is {slot}, as slot_mapping[{written.get(slot)}] is"
        rules.require(slot not in written, what, "each new token must have a slot of its own")
        written[slot] = t
        if positions is not None and cos is not None:
            position, rows = int(positions[t]), len(cos)
            rule = f"a position must be within 0 .. {rows - 1}, the rows of cos"
            rules.require(0 <= position < rows, f"positions[{t}] is {position}", rule)


def _append(
    new: NewRows,
    pages: dict[str, Tensor],
    slots: Tensor,
    positions: Tensor | None,
) -> None:
    """Append with torch operations."""
    real = slots >= 0
    slots, size = slots[real].long(), pages["k_pages"].shape[1]
    rows = [x[: len(real)][real] for x in (new.k, new.v) if x is not None]
    if positions is not None and new.angles is not None:
        rows[0] = rotated(rows[0], positions[: len(real)][real].long(), new.angles, new.interleaved)
    for target, x, scale in zip(pages.values(), rows, new.scales, strict=False):
        write_rows(target, (slots // size, slots % size), x, scale)


def _launch(tensors: tuple[Tensor | None, ...], interleaved: bool) -> None:
    """Launch the kernel for the tokens that have slots."""
    k_pages, v_pages, k, v, slots, positions, cos, sin, k_scale, v_scale = tensors
    assert k_pages is not None and k is not None and slots is not None
    angles = None if cos is None or sin is None else (cos, sin)
    new = NewRows(k, v, angles, interleaved, (k_scale, v_scale))
    _calls.launch(tensors, interleaved, lambda arch: slot_launches(arch, (k_pages, v_pages), slots, positions, new))
