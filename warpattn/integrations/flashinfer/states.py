"""Merging of states (v, s): outputs (rows, heads, dim) and log-sum-exps in base 2, (rows, heads)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import warpattn
from warpattn.errors import AttentionError, Rules, many
from warpattn.inputs import is_tensor
from warpattn.integrations.flashinfer.layer import in_base_2, in_base_e
from warpattn.serving.filled import fill, require_own

MOST = 16  # states that `warpattn.merge_states` takes
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class State(NamedTuple):
    """Output v (rows, heads, dim) and log-sum-exp s (rows, heads) over some keys, with the names of their arguments."""

    v_name: str
    v: Tensor
    s_name: str
    s: Tensor


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Two states of the same queries over different keys."""
    return _merged([State("v_a", v_a, "s_a", s_a), State("v_b", v_b, "s_b", s_b)])


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """v (rows, states, heads, dim), s (rows, states, heads)."""
    _check({"v": v}, "rows", "states", "heads", "dim")
    _check({"s": s}, "rows", "states", "heads")
    if s.shape != v.shape[:3]:
        rule = "they must be (rows, states, heads, dim) and (rows, states, heads)"
        raise AttentionError(f"v has shape {tuple(v.shape)} and s {tuple(s.shape)}; {rule}")
    if not v.shape[1]:
        raise AttentionError("v has 0 states; there must be at least 1")
    if v.shape[1] > MOST and v.dtype in DTYPES:  # in rounds, in fp32
        rounds = [merge_states(v.float()[:, i : i + MOST], s[:, i : i + MOST]) for i in range(0, v.shape[1], MOST)]
        out, lse = merge_states(*(torch.stack(side, 1) for side in zip(*rounds, strict=True)))
        return out.to(v.dtype), lse
    return _merged([State("v", v[:, i], "s", s[:, i]) for i in range(v.shape[1])])


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    """Merge the other state into v and s; rows where `mask` (rows,) is False stay."""
    merged = _merged([State("v", v, "s", s), State("v_other", v_other, "s_other", s_other)])
    if s.dtype != torch.float32:
        raise AttentionError(f"s has dtype {s.dtype}; it is overwritten and must be torch.float32")
    if mask is not None:
        _check({"mask": mask}, "rows")
        if len(mask) != len(v):
            raise AttentionError(f"mask has {many(len(mask), 'row')}; it must have those of v, {len(v)}")
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


def _merged(states: list[State]) -> tuple[Tensor, Tensor]:
    rules = Rules()
    for state in states:
        _check_state(rules, state, states[0])
    rules.done()
    out, lse = warpattn.merge_states([(state.v, in_base_e(state.s.float().transpose(0, 1))) for state in states])
    return out, in_base_2(lse).transpose(0, 1).contiguous()


def _check_state(rules: Rules, state: State, first: State) -> None:
    """Check a state by the names of the caller's arguments, so that those of `warpattn.merge_states` never appear."""
    v_name, v, s_name, s = state
    fine = rules.tensor(v_name, v, "rows", "heads", "dim"), rules.tensor(s_name, s, "rows", "heads")
    if not all(fine) or not is_tensor(first.v):
        return
    listed = " or ".join(map(str, DTYPES))
    rules.require(v.dtype in DTYPES, f"{v_name} has dtype {v.dtype}", f"it must be {listed}")
    rules.require(s.is_floating_point(), f"{s_name} has dtype {s.dtype}", "it must be a floating dtype")
    of_first = f"it must be that of {first.v_name}"
    shape = f"{v_name} has shape {tuple(v.shape)}"
    rules.require(v.shape == first.v.shape, shape, f"{of_first}, {tuple(first.v.shape)}")
    rules.require(v.dtype == first.v.dtype, f"{v_name} has dtype {v.dtype}", f"{of_first}, {first.v.dtype}")
    what = f"{s_name} has shape {tuple(s.shape)}"
    rules.require(s.shape == v.shape[:2], what, f"it must be {tuple(v.shape[:2])}, by the shape of {v_name}")
    for name, x in ((v_name, v), (s_name, s)):
        rules.require(x.device == first.v.device, f"{name} is on {x.device}", f"{of_first}, {first.v.device}")
