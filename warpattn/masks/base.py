"""Defines `Mask`, and how masks combine.

`keep(b, h, q, k)` says whether a query sees a key. `kv_span` bounds that for a tile of rows, so that kernels and
reference skip keys that are hidden from all rows and need no test for keys that all rows see:

    keys   0      first      full_lo      full_hi      last     len_k
           |hidden|--- keep ---|  visible   |--- keep ---|  hidden |

q counts in key positions: row + (len_k - len_q), so that the last query sits at the last key (bottom-right aligned);
it is negative for the first rows when there are more queries than keys. `&`, `|` and `~` combine masks and their spans.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NoReturn

from warpattn.errors import AttentionError
from warpattn.inputs import kind_of, of_type, with_article
from warpattn.language.expr import maximum, minimum, saturated, symbols, trace, where
from warpattn.language.traced import Lengths, Traced, refuse_nested
from warpattn.masks.picture import Picture, draw
from warpattn.masks.program import MaskProgram, Span
from warpattn.scores import Score, chained

Value = Any  # a symbol, a number or a tensor
SPAN_RULE = "it must return Span(first, full_lo, full_hi, last)"


class Mask(Traced):
    """A set of visible (query, key) pairs. A subclass must define `keep`; defining `kv_span` makes it fast."""

    def keep(self, b: Value, h: Value, q: Value, k: Value, lens: Lengths | None = None) -> Value:
        """Whether query position q of head h in sequence b sees key k (bool). lens None: as many queries as keys."""
        raise AttentionError(f"mask is {of_type(self)} without keep; a mask must define keep(b, h, q, k, lens)")

    def kv_span(self, b: Value, h: Value, q_lo: Value, q_hi: Value, lens: Lengths) -> Span:
        """Bounds for the rows at positions q_lo..q_hi, both included. May exceed 0..lens.k; see `Span.clamped`."""
        return Span(0, 0, 0, lens.k)

    def additive(self) -> Score | None:
        """The score that the mask adds to visible keys, after every other score; None for masks that only hide."""
        return None

    def picture(self, Sq: int, Sk: int, b: int = 0, h: int = 0, tile: int = 4) -> Picture:
        """Draw Sq queries by Sk keys: `.text` (also `str()`), and `.svg` with the spans of every `tile` rows."""
        return draw(self.program(), (Sq, Sk), (b, h), tile)

    def record(self) -> MaskProgram:
        """Trace `keep` and `kv_span`."""

        def run() -> tuple[Value, ...]:
            lens, (b, h, q, k, q_lo, q_hi) = Lengths.symbols(), symbols("b", "h", "q", "k", "q_lo", "q_hi")
            span = self.kv_span(b, h, q_lo, q_hi, lens)
            if not isinstance(span, Span):
                self.refuse_result("kv_span", kind_of(span), SPAN_RULE)
            bounds = (saturated(bound) for bound in span.clamped(lens.k))
            return (self.keep(b, h, q, k, lens), *bounds)

        traced = trace(run)
        keep, first, full_lo, full_hi, last = traced.outputs
        kind, *bounds = map(attrgetter("dtype"), traced.outputs)
        if kind != "bool":
            self.refuse_result("keep", with_article(kind), "it must return a bool, such as a comparison")
        if "float" in bounds:
            self.refuse_result("kv_span", "a float", "its bounds are ints")
        return MaskProgram(keep, (first, full_lo, full_hi, last), traced.tensors, traced.key)

    def refuse_result(self, name: str, found: str, rule: str) -> NoReturn:
        """Raise AttentionError because the method `name` returned `found`."""
        raise AttentionError(f"{name} of {of_type(self)} returned {found}; {rule}")

    def __and__(self, other: Mask) -> And:
        return And(self, other)

    def __or__(self, other: Mask) -> Or:
        return Or(self, other)

    def __invert__(self) -> Mask:
        return Not(self)


def span_of(mask: Mask, b: Value, h: Value, rows: tuple[Value, Value], lens: Lengths) -> Span:
    """Call `kv_span` for the first and last row; raises AttentionError if the result is no Span."""
    span = mask.kv_span(b, h, *rows, lens)
    if not isinstance(span, Span):
        mask.refuse_result("kv_span", kind_of(span), SPAN_RULE)
    return span


@dataclass(frozen=True)
class And(Mask):
    """Visible in both, the result of `a & b`."""

    left: Mask
    right: Mask

    def __post_init__(self) -> None:
        _check_parts("&", (self.left, self.right), may_add=True)

    def keep(self, b: Value, h: Value, q: Value, k: Value, lens: Lengths | None = None) -> Value:
        return self.left.keep(b, h, q, k, lens) & self.right.keep(b, h, q, k, lens)

    def kv_span(self, b: Value, h: Value, q_lo: Value, q_hi: Value, lens: Lengths) -> Span:
        x, y = (span_of(mask, b, h, (q_lo, q_hi), lens) for mask in (self.left, self.right))
        first, last = maximum(x.first, y.first), minimum(x.last, y.last)
        return Span(first, maximum(x.full_lo, y.full_lo), minimum(x.full_hi, y.full_hi), last)

    def additive(self) -> Score | None:
        return chained(self.left.additive(), self.right.additive())


@dataclass(frozen=True)
class Or(Mask):
    """Visible in at least one of both, the result of `a | b`."""

    left: Mask
    right: Mask

    def __post_init__(self) -> None:
        _check_parts("|", (self.left, self.right), may_add=False)

    def keep(self, b: Value, h: Value, q: Value, k: Value, lens: Lengths | None = None) -> Value:
        return self.left.keep(b, h, q, k, lens) | self.right.keep(b, h, q, k, lens)

    def kv_span(self, b: Value, h: Value, q_lo: Value, q_hi: Value, lens: Lengths) -> Span:
        x, y = (span_of(mask, b, h, (q_lo, q_hi), lens).clamped(lens.k) for mask in (self.left, self.right))
        firsts = [where(side.first < side.last, side.first, lens.k) for side in (x, y)]  # an empty side does not count
        lasts = [where(side.first < side.last, side.last, 0) for side in (x, y)]
        size_x, size_y = x.full_hi - x.full_lo, y.full_hi - y.full_lo
        touch = (x.full_lo <= y.full_hi) & (y.full_lo <= x.full_hi)  # an empty part that touches lies in the other
        longer_lo, longer_hi = (where(size_x >= size_y, x[i], y[i]) for i in (1, 2))
        full_lo = where(touch, minimum(x.full_lo, y.full_lo), longer_lo)
        full_hi = where(touch, maximum(x.full_hi, y.full_hi), longer_hi)
        return Span(minimum(*firsts), full_lo, full_hi, maximum(*lasts))


@dataclass(frozen=True)
class Not(Mask):
    """Visible where the other mask hides, the result of `~a`."""

    mask: Mask

    def __post_init__(self) -> None:
        _check_parts("~", (self.mask,), may_add=False)

    def keep(self, b: Value, h: Value, q: Value, k: Value, lens: Lengths | None = None) -> Value:
        kept = self.mask.keep(b, h, q, k, lens)
        return not kept if isinstance(kept, bool) else ~kept

    def kv_span(self, b: Value, h: Value, q_lo: Value, q_hi: Value, lens: Lengths) -> Span:
        x = span_of(self.mask, b, h, (q_lo, q_hi), lens).clamped(lens.k)
        has_full, nothing = x.full_lo < x.full_hi, x.first >= x.last
        first = where(has_full & (x.full_lo <= 0), x.full_hi, 0)
        last = where(has_full & (x.full_hi >= lens.k), x.full_lo, lens.k)
        before = nothing | (x.first >= lens.k - x.last)  # the hidden keys before the span are the longer part
        full_lo = where(before, 0, x.last)
        full_hi = where(nothing, lens.k, where(before, x.first, lens.k))  # ~ of a plain bool is no bool
        return Span(first, full_lo, full_hi, last)

    def __invert__(self) -> Mask:
        return self.mask


@dataclass(frozen=True)
class InOrder(Mask):
    """The same mask with a span whose key tiles kernels visit from the last down, wherever a tile of rows begins. With
    a masked part before the full part, they would visit that part out of order."""

    mask: Mask

    def keep(self, b: Value, h: Value, q: Value, k: Value, lens: Lengths | None = None) -> Value:
        return self.mask.keep(b, h, q, k, lens)

    def kv_span(self, b: Value, h: Value, q_lo: Value, q_hi: Value, lens: Lengths) -> Span:
        span = span_of(self.mask, b, h, (q_lo, q_hi), lens)
        if all(type(bound) is int and bound <= 0 for bound in (span.first, span.full_lo)):
            return span
        return Span(span.first, lens.k, 0, span.last)

    def additive(self) -> Score | None:
        return self.mask.additive()


def in_order(mask: Mask | None, batch_invariant: bool) -> Mask | None:
    """Return the mask of a plan; if batch-invariant, kernels visit key tiles in one order for all tiles of rows."""
    return InOrder(mask) if batch_invariant and isinstance(mask, Mask) else mask


def _check_parts(operator: str, parts: tuple[Any, ...], may_add: bool) -> None:
    for part in parts:
        if not isinstance(part, Mask):
            raise AttentionError(f"{operator} got {kind_of(part)}; & | ~ combine masks with masks")
        if not may_add and _adds(part):
            raise AttentionError(f"{operator} got an additive mask; additive masks combine by & only")


def _adds(mask: Mask) -> bool:
    try:
        return mask.additive() is not None
    except RecursionError as error:
        refuse_nested(mask, error)
        raise
