"""Scores: what happens to s = scale * (q . k) before the softmax, as functions of s and the indices.

`a | b` applies a, then b. Order with the rest: scale, scores from left to right, then an additive mask, then hidden
keys become -inf, then the softmax (sinks join its denominator untouched). s is in natural units: p = exp(s) / sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from warpattn.errors import AttentionError
from warpattn.inputs import is_tensor, kind_of, number, of_type
from warpattn.language.derivative import Derivative, differentiate
from warpattn.language.expr import (
    Expr,
    Node,
    Table,
    exp,
    load,
    symbol,
    symbols,
    tanh,
    to_float,
    trace,
    user_result_error,
    where,
)
from warpattn.language.functions import OfFunction
from warpattn.language.nodes import ProgramKey
from warpattn.language.open_sizes import settled
from warpattn.language.traced import Lengths, Traced, require, same_object, settle, whole
from warpattn.language.user_code import call_user

Value = Any  # a symbol, a number or a tensor
LEAST_CAP, LARGEST_CAP = 1e-30, 1e30  # of a soft cap; outside, its square or inverse is no fp32 number
CAP_RULE = f"SoftCap takes a number from {LEAST_CAP} to {LARGEST_CAP}"  # torch.compile may trace the two as symbols
LOOSE_CAP = 2.0**12  # from this cap on the error of the hardware's tanh, 2^-11 of it or 2^-24, times the cap matters


@dataclass(frozen=True, eq=False)
class ScoreProgram:
    """A traced score: `out` over the symbols s (float), b, h, q, k, len_q, len_k; `key` identifies the code."""

    out: Node
    tensors: tuple[Tensor, ...]
    key: ProgramKey

    @cached_property
    def derivative(self) -> Derivative:
        """df/ds, and df/dT for the element that is read of each captured float tensor T."""
        return differentiate(self.out, self.tensors)


class Score(Traced):
    """A function of one score and its indices; a subclass only has to define `apply`."""

    def apply(self, s: Value, b: Value, h: Value, q: Value, k: Value, lens: Lengths | None = None) -> Value:
        """The new score of query head h, query position q and key k in sequence b.

        q counts in key positions (the last query sits at the last key). `lens` are the lengths of the sequence; None
        means that it has as many queries as keys.
        """
        what = f"score is {of_type(self)} without apply"
        raise AttentionError(f"{what}; a score must define apply(s, b, h, q, k, lens)")

    def __or__(self, other: Score) -> Chain:
        return Chain((*_links(self), *_links(other)))

    def record(self) -> ScoreProgram:
        """Trace `apply` into a program."""

        def run() -> Value:
            s, (b, h, q, k) = symbol("s", "float"), symbols("b", "h", "q", "k")
            return to_float(self.apply(s, b, h, q, k, Lengths.symbols()))

        traced = trace(run)
        return ScoreProgram(traced.outputs[0], traced.tensors, traced.key)


@dataclass(frozen=True)
class Chain(Score):
    """Scores applied from left to right, the result of `a | b`."""

    scores: tuple[Score, ...]

    def __post_init__(self) -> None:
        for score in self.scores:
            if not isinstance(score, Score):
                raise AttentionError(f"a chain of scores got {kind_of(score)}; join scores with scores")

    def apply(self, s: Value, b: Value, h: Value, q: Value, k: Value, lens: Lengths | None = None) -> Value:
        for score in self.scores:
            s = score.apply(s, b, h, q, k, lens)
        return s


def chained(first: Score | None, second: Score | None) -> Score | None:
    """Return `first | second`, of which one or both may be None."""
    if first is None or second is None:
        return second if first is None else first
    return first | second


@dataclass(frozen=True)
class ALiBi(Score):
    """s - slope * |q - k| (Press et al., arXiv 2108.12409).

    slopes: float tensor [H] or [B, H] (H query heads), or the number of query heads for the paper's slopes:
    2**(-8 (h + 1) / H) when H is a power of two; else, with f the power of two below H, 2**(-8 (h + 1) / f) for h < f
    and 2**(-8 (2 (h - f) + 1) / (2 f)) for the others.
    """

    slopes: Tensor | int = field(compare=False)
    _slopes: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        slopes = self.slopes
        if not (is_tensor(slopes) and slopes.is_floating_point() and slopes.ndim in (1, 2)):
            slopes = whole(slopes, 1)
            require(slopes is not None, f"slopes is {kind_of(self.slopes)}",
                    "ALiBi takes a float tensor (H,) or (B, H), or the number of query heads")  # fmt: skip
            settle(self, "slopes", slopes)
        object.__setattr__(self, "_slopes", same_object(slopes))

    def slope(self, b: Value, h: Value) -> Value:
        """The slope of one head."""
        if isinstance(self.slopes, Tensor):
            return load(self.slopes, *((h,) if self.slopes.ndim == 1 else (b, h)))
        below = 1 << (int(self.slopes).bit_length() - 1)  # H itself or the power of two below it
        unit = 8 * math.log(2) / below
        first = exp((h + 1) * -unit)
        if below == self.slopes:
            return first
        return where(h < below, first, exp((2 * (h - below) + 1) * (-unit / 2)))

    def apply(self, s: Value, b: Value, h: Value, q: Value, k: Value, lens: Lengths | None = None) -> Value:
        return s - self.slope(b, h) * abs(to_float(q) - to_float(k))


@dataclass(frozen=True)
class SoftCap(Score):
    """cap * tanh(s / cap): keeps scores within (-cap, cap) (Gemma 2, arXiv 2408.00118).

    cap: a number from 1e-30 to 1e30; AttentionError for others.
    """

    cap: float

    def __post_init__(self) -> None:
        cap = number(self.cap)
        ok = cap is not None and LEAST_CAP <= cap <= LARGEST_CAP
        require(ok, f"cap is {kind_of(self.cap)}", CAP_RULE)
        settle(self, "cap", cap)

    def apply(self, s: Value, b: Value, h: Value, q: Value, k: Value, lens: Lengths | None = None) -> Value:
        cap = float(self.cap)
        x = s * (1.0 / cap)
        if cap < LOOSE_CAP:
            return tanh(x) * cap
        return where(abs(x) < 2.0**-6, s * (1.0 - x * x / 3.0), tanh(x) * cap)


@dataclass(frozen=True, eq=False)
class Bias(Score):
    """s + bias[b, h, row, k], row counting queries from 0.

    bias: float tensor that broadcasts to (B, H, Sq, Sk), rank 2 to 4; where lengths differ, Sq and Sk are at least
    those of the longest sequence. Gradients reach it.
    """

    bias: Tensor

    def __post_init__(self) -> None:
        fits = is_tensor(self.bias) and self.bias.is_floating_point() and 2 <= self.bias.ndim <= 4
        require(fits, f"bias is {kind_of(self.bias)}",
                "Bias takes a float tensor of rank 2 to 4 that broadcasts to (B, H, Sq, Sk)")  # fmt: skip

    def apply(self, s: Value, b: Value, h: Value, q: Value, k: Value, lens: Lengths | None = None) -> Value:
        row = q if lens is None else q - (lens.k - lens.q)
        return s + load(self.bias, *broadcast_index(self.bias.shape, (b, h, row, k)))


@dataclass(frozen=True, init=False, eq=False)
class CustomScore(OfFunction, Score):
    """fn(s, b, h, q, k, **captured), a Python function that serves the reference and the kernels unchanged.

    s is a float, the indices are ints (q counts in key positions, see `Score.apply`). captured: tensors, which the
    function indexes with one int per dimension (0 outside), and numbers. The function uses operators, comparisons,
    `& | ~`, `**`, and where, minimum, maximum, abs, exp, log, tanh, to_float, to_int of warpattn. It is run once with
    symbols, so globals and closures are read once; what cannot be recorded raises an AttentionError naming its line.
    In a function that torch.compile traces it may close over numbers, sizes that change among them, but not over
    tensors.
    """

    fn: Callable[..., Any]
    captured: tuple[tuple[str, Any], ...]

    def __init__(self, fn: Callable[..., Any], **captured: Any) -> None:
        object.__setattr__(self, "fn", settled(fn, "CustomScore"))
        object.__setattr__(self, "captured", captured_values("CustomScore", fn, captured))

    def apply(self, s: Value, b: Value, h: Value, q: Value, k: Value, lens: Lengths | None = None) -> Value:
        result = call_user(self.fn, s, b, h, q, k, **dict(self.captured))
        is_number = isinstance(result, int | float) and not isinstance(result, bool)
        symbolic = isinstance(result, Expr) and result.dtype != "bool"
        eager = isinstance(result, Tensor) and not isinstance(s, Expr) and result.dtype != torch.bool
        if not (is_number or symbolic or eager):
            raise user_result_error(self.fn, result, "a score function must return a float made from its arguments")
        return to_float(result)


def captured_values(owner: str, fn: Any, captured: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Check the captured keyword arguments of a custom function; wrap tensors so that symbols can index them."""
    require(callable(fn), f"{owner} got {kind_of(fn)}", "its first argument must be a function")
    for name, value in captured.items():
        ok = isinstance(value, Table | bool | int | float) or is_tensor(value)
        require(ok, f"{owner} captures {name}={kind_of(value)}", "captured values are tensors and numbers")
    return tuple((name, same_object(value)) for name, value in captured.items())


def broadcast_index(shape: torch.Size, index: tuple[Value, ...]) -> tuple[Value, ...]:
    """Return the last `len(shape)` indices of `index`, 0 for a dimension of size 1."""
    return tuple(0 if size == 1 else i for size, i in zip(shape, index[len(index) - len(shape) :], strict=True))


def _links(score: Score) -> tuple[Score, ...]:
    return score.scores if isinstance(score, Chain) else (score,)
