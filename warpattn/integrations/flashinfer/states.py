"""Merging of states (v, s): outputs (rows, heads, dim) and log-sum-exps in base 2, (rows, heads)."""

from __future__ import annotations

import torch
from torch import Tensor

import warpattn
from warpattn.errors import AttentionError, Rules
from warpattn.integrations.flashinfer.layer import in_base_2, in_base_e
from warpattn.serving.filled import fill, require_own

__all__ = ["merge_state", "merge_state_in_place", "merge_states"]


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Two states of the same queries over different keys."""
    return _merged([(v_a, s_a), (v_b, s_b)])


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """v (rows, states, heads, dim), s (rows, states, heads)."""
    _check({"v": v}, "rows", "states", "heads", "dim")
    _check({"s": s}, "rows", "states", "heads")
    if s.shape != v.shape[:3]:
        rule = "they must be (rows, states, heads, dim) and (rows, states, heads)"
        raise AttentionError(f"v has shape {tuple(v.shape)} and s {tuple(s.shape)}; {rule}")
    return _merged(list(zip(v.unbind(1), s.unbind(1), strict=True)))


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    """Merge the other state into v and s; rows where `mask` (rows,) is False stay."""
    merged = _merged([(v, s), (v_other, s_other)])
    if s.dtype != torch.float32:
        raise AttentionError(f"s has dtype {s.dtype}; it is overwritten and must be torch.float32")
    if mask is not None:
        _check({"mask": mask}, "rows")
        if len(mask) != len(v):
            raise AttentionError(f"mask has {len(mask)} rows; it must have those of v, {len(v)}")
    if not torch.compiler.is_compiling():
        require_own({"v": v})
        require_own({"s": s}, {"v": v})
    for own, new in zip((v, s), merged, strict=True):
        keep = None if mask is None else mask.bool().view(-1, *[1] * (own.ndim - 1))
        fill(own, new if keep is None else torch.where(keep, new, own))


def _check(named: dict[str, Tensor], *axes: str) -> None:
    rules = Rules()
    for name, x in named.items():
        rules.tensor(name, x, *axes)
    rules.done()


def _merged(states: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    for v, s in states:
        _check({"v": v}, "rows", "heads", "dim")
        _check({"s": s}, "rows", "heads")
        if not s.is_floating_point():
            raise AttentionError(f"s has dtype {s.dtype}; it must be a floating dtype")
    natural = [(v, in_base_e(s.float().transpose(0, 1))) for v, s in states]
    out, lse = warpattn.merge_states(natural)
    return out, in_base_2(lse).transpose(0, 1).contiguous()
