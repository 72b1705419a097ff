"""Rules of the index tensors of sequences: offsets, lengths, tables, promised bounds."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from warpattn.errors import Rules, many
from warpattn.inputs import kind_of, number

INDEX_DTYPE = torch.int32


def settle_ints(owner: object, *names: str) -> None:
    """Make ints of fields that are NumPy's ints or tensors without dimensions."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and type(value) is not int:
            known = number(value)
            object.__setattr__(owner, name, value if known is None else known)


def check_bound(rules: Rules, name: str, bound: object) -> None:
    """Check a promised upper bound."""
    ok = bound is None or (isinstance(bound, int) and not isinstance(bound, bool) and bound >= 0)
    rules.require(ok, f"seq.{name} is {kind_of(bound)}", f"seq.{name} must be None or an int of at least 0")


def check_index(rules: Rules, name: str, value: Tensor, *axes: str) -> bool:
    """Check rank and dtype of a tensor of offsets, lengths or pages."""
    if not rules.tensor(name, value, *axes):
        return False
    return rules.require(value.dtype == INDEX_DTYPE, f"{name} has dtype {value.dtype}", f"{name} must be torch.int32")


def check_offsets(rules: Rules, side: str, offsets: Tensor, total: int, bound: int | None) -> None:
    """Check the values of row offsets: from 0, ascending, to the total, no length over the promised bound."""
    name, host = f"seq.cu_{side}", offsets.tolist()
    rules.require(host[0] == 0, f"{name}[0] is {host[0]}", f"{name} must start at 0")
    rules.require(host[-1] == total, f"{name}[-1] is {host[-1]}", f"{name} must end at the rows it divides, {total}")
    for b, (start, stop) in enumerate(pairwise(host)):
        what = f"{name}[{b}] is {start} and {name}[{b + 1}] is {stop}"
        if not rules.require(start <= stop, what, f"{name} must never descend"):
            return
        if bound is not None:
            what = f"seq.max_{side} is {bound}"
            rule = f"sequence {b} has {many(stop - start, 'row')} by {name}"
            if not rules.require(stop - start <= bound, what, rule):
                return


def check_table(rules: Rules, lengths: list[int], table: Tensor, k_pages: Tensor) -> None:
    """Check the values of lengths, and of the entries of the table that they use."""
    pages, page_size = k_pages.shape[:2]
    capacity = table.shape[1] * page_size
    for b, length in enumerate(lengths):
        rule = f"a length must be within 0 .. {capacity}, the keys of {many(table.shape[1], 'page')}"
        if not rules.require(0 <= length <= capacity, f"kv.lengths[{b}] is {length}", rule):
            continue
        used = table[b, : -(-length // page_size)]
        outside = ((used < 0) | (used >= pages)).nonzero().flatten().tolist()
        if outside:
            what = f"kv.block_table[{b}, {outside[0]}] is {int(used[outside[0]])}"
            rules.require(False, what, f"a page in use must be within 0 .. {pages - 1}, the pages of the cache")


def check_shared(rules: Rules, queries: list[int], lengths: Tensor, own: Tensor, pages: tuple[int, int]) -> None:
    """Check the promise that sequences with queries share their first pages. own: these pages in the table; pages: the
    number of shared pages and of their keys."""
    shared, keys = pages
    live = [b for b, count in enumerate(queries) if count and shared]
    for b in live:
        rule = f"sequences {live[0]} and {b} begin with other pages"
        what, length = f"kv.shared_pages is {shared}", int(lengths[b])
        rules.require(torch.equal(own[b], own[live[0]]), what, rule)
        rule = f"the {queries[b]} newest of {many(length, 'key')} of sequence {b} must come after those {keys}"
        rules.require(length - queries[b] >= keys, what, rule)


def check_shapes(rules: Rules, k_pages: Tensor, v_pages: Tensor) -> bool:
    """Check the shapes of pages; True if their ranks are right."""
    named = (("kv.k_pages", k_pages), ("kv.v_pages", v_pages))
    if not all([rules.tensor(name, x, "num_pages", "page_size", "heads", "head_dim") for name, x in named]):
        return False
    what = f"kv.v_pages has {many(v_pages.shape[0], 'page')} of {many(v_pages.shape[1], 'key')}"
    rule = f"it must match kv.k_pages, {many(k_pages.shape[0], 'page')} of {many(k_pages.shape[1], 'key')}"
    rules.require(k_pages.shape[:2] == v_pages.shape[:2], what, rule)
    what = f"kv.k_pages has shape {tuple(k_pages.shape)}"
    rules.require(k_pages.shape[1] > 0, what, "a page must hold at least one key")
    return True
