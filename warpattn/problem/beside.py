"""Rules of a call's arguments other than q, k and v: sinks, the output, tensors that its mask and score captured."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from warpattn.errors import Rules
from warpattn.masks import Document, Mask, Materialized, Padding, Prefix
from warpattn.problem.eight_bit import DTYPES
from warpattn.problem.memory import overlap, overlaps_itself
from warpattn.problem.problem import Call
from warpattn.quantized import EIGHT_BIT
from warpattn.scores import ALiBi, Bias, Score
from warpattn.sequences import Sizes


def check_beside(rules: Rules, call: Call, sizes: Sizes, dtype: torch.dtype | None) -> None:
    """Check shapes and dtypes of sinks, output and captured tensors; `dtype` is that of the result."""
    _check_sinks(rules, call, sizes, dtype)
    _check_out(rules, call, sizes)
    for part in (*parts(call.mask), *parts(call.score)):
        _check_part(rules, part, call, sizes)


def parts(value: Mask | Score | None) -> Iterator[Mask | Score]:
    """Yield the masks or scores that a combination is made of."""
    waiting = [value] if isinstance(value, Mask | Score) else []
    while waiting:
        one = waiting.pop()
        inner = [x for held in vars(one).values() for x in _listed(held) if isinstance(x, Mask | Score)]
        if not inner:
            yield one
        waiting += reversed(inner)


def _listed(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else (value,)


def _check_sinks(rules: Rules, call: Call, sizes: Sizes, found: torch.dtype | None) -> None:
    """Check sinks: shape (Hq,), fp32 or the dtype of the result."""
    if call.sinks is None or not rules.tensor("sinks", call.sinks, "query heads"):
        return
    shape, dtype = tuple(call.sinks.shape), call.sinks.dtype
    rule = f"sinks must hold one logit per query head, ({sizes.heads_q},)"
    rules.require(shape == (sizes.heads_q,), f"sinks has shape {shape}", rule)
    rule = f"sinks must be torch.float32 or the dtype of the result, {found}"
    rules.require(dtype in (torch.float32, found), f"sinks has dtype {dtype}", rule)


def _check_out(rules: Rules, call: Call, sizes: Sizes) -> None:
    """Check out: the shape and dtype of the result, each element at its own place in memory."""
    out = call.out
    if out is None or not rules.tensor("out", out, *("batch", "seq", "heads", "head_dim")[4 - call.q.ndim :]):
        return
    shape = (*call.q.shape[:-1], sizes.dim_v)
    rules.require(out.shape == shape, f"out has shape {tuple(out.shape)}", f"out must have shape {tuple(shape)}")
    if call.q.dtype in EIGHT_BIT:
        rule = f"for 8-bit queries it must be one of {', '.join(str(x) for x in DTYPES)}"
        rules.require(out.dtype in DTYPES, f"out has dtype {out.dtype}", rule)
    else:
        same = out.dtype == call.q.dtype
        rules.require(same, f"out has dtype {out.dtype}", f"out must have the dtype of q, {call.q.dtype}")
    if overlaps_itself(out):
        rules.add(f"out has shape {tuple(out.shape)} and strides {out.stride()}",
                  "each element of out must have its own place in memory")  # fmt: skip
    others = {"q.rope": call.sequence.q_rope, "v.transposed": call.sequence.v_transposed, "sinks": call.sinks}
    for name, x in (call.sequence.operands(call.q, call.k, call.v) | others).items():
        if isinstance(x, Tensor) and overlap(out, x):
            what = f"out starts at {out.data_ptr()} and {name} at {x.data_ptr()}"
            rules.add(what, f"out must not share memory with {name}: others may still read what is written")


def _check_part(rules: Rules, part: Mask | Score, call: Call, sizes: Sizes) -> None:
    """Check the shapes of captured tensors whose axes are the batch, the heads, the rows or the keys.

    Rows and keys are compared for dense batches only: elsewhere their number differs between sequences, keys outside
    a mask's tensor are hidden, and a bias must cover the longest sequence (`check_values`).
    """
    dense = call.sequence.kind == "dense"
    batch, heads = ("batch", sizes.batch), ("query heads", sizes.heads_q)
    queries, keys = ("queries", sizes.seq_q if dense else None), ("keys", sizes.seq_k if dense else None)
    match part:
        case Padding():
            _check_axes(rules, "Padding.valid_lengths", part.valid_lengths, (batch,))
        case Prefix() if isinstance(part.length, Tensor):
            _check_axes(rules, "Prefix.length", part.length, (batch,))
        case Document():
            _check_axes(rules, "Document.ids", part.ids, (batch, keys))
        case Materialized():
            axes = (batch, queries, keys) if part.mask.ndim == 3 else (batch, heads, queries, keys)
            _check_axes(rules, "Materialized.mask", part.mask, axes, broadcast=True)
        case ALiBi() if isinstance(part.slopes, Tensor):
            _check_axes(rules, "ALiBi.slopes", part.slopes, (batch, heads))
        case ALiBi():
            what = f"ALiBi.slopes is {part.slopes}, a number of heads"
            rules.require(int(part.slopes) == sizes.heads_q, what, f"it must be that of q, {sizes.heads_q}")
        case Bias():
            _check_axes(rules, "Bias.bias", part.bias, (batch, heads, queries, keys), broadcast=True)


def _check_axes(
    rules: Rules, name: str, x: Tensor, axes: tuple[tuple[str, int | None], ...], broadcast: bool = False
) -> None:
    """Require the axes of `x`, the last ones of `axes`, to have their sizes (None: any), or 1 if `broadcast`."""
    for got, (axis, size) in zip(tuple(x.shape), axes[len(axes) - x.ndim :], strict=True):
        ok = size is None or got == size or (broadcast and got == 1)
        listed = f"{size} or 1" if broadcast else str(size)
        rules.require(ok, f"{name} has shape {tuple(x.shape)}", f"its {axis} axis must be {listed}, as in q and k")


def check_values(rules: Rules, call: Call, sizes: Sizes) -> None:
    """Check the values of lengths, offsets and tables, read on the host."""
    call.sequence.check_values(rules, sizes)
    longest = sizes.seq_k if call.sequence.kind == "dense" else None
    for part in parts(call.mask):
        if isinstance(part, Padding):
            _check_lengths(rules, "Padding.valid_lengths", part.valid_lengths, longest)
        elif isinstance(part, Prefix) and isinstance(part.length, Tensor):
            _check_lengths(rules, "Prefix.length", part.length, None)
    if call.sequence.kind != "dense" and not rules.broken:
        for part in parts(call.score):
            if isinstance(part, Bias):
                _check_reach(rules, part.bias, call.sequence.longest(sizes))


def _check_reach(rules: Rules, bias: Tensor, longest: tuple[int, int]) -> None:
    """Require a bias to cover every row and key of the longest sequences: outside of it, 0 would be read."""
    for axis, got, least in zip(("queries", "keys"), bias.shape[-2:], longest, strict=True):
        rule = f"its {axis} axis must be 1 or at least {least}, those of the longest sequence"
        rules.require(got == 1 or got >= least, f"Bias.bias has shape {tuple(bias.shape)}", rule)


def _check_lengths(rules: Rules, name: str, lengths: Tensor, longest: int | None) -> None:
    bound = "at least 0" if longest is None else f"within 0 .. {longest}, the number of keys"
    for b, length in enumerate(lengths.tolist()):
        ok = length >= 0 and (longest is None or length <= longest)
        if not rules.require(ok, f"{name}[{b}] is {length}", f"a length must be {bound}"):
            return
