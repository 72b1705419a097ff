"""`Span`, the keys of a tile of rows, and `MaskProgram`, the traced mask that reference and kernels run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from warpattn.language.expr import Node, maximum, minimum
from warpattn.language.nodes import Program, ProgramKey, build, const

Value = Any  # a symbol, a number or a tensor
_Q, _K, _LEN_K = (Node(("sym", "int", name)) for name in ("q", "k", "len_k"))


class Span(NamedTuple):
    """Keys outside [first, last) are hidden from all rows of a tile, keys in [full_lo, full_hi) visible to all.

    first >= last: nothing is visible. full_lo >= full_hi: no full part.
    """

    first: Value
    full_lo: Value
    full_hi: Value
    last: Value

    def clamped(self, len_k: Value) -> Span:
        """Return the same span with first and last in 0..len_k and the full part between them."""
        first = self.first if type(self.first) is int and self.first == 0 else minimum(maximum(self.first, 0), len_k)
        last = self.last if self.last is len_k else maximum(minimum(self.last, len_k), 0)
        full_lo = first if self.full_lo is self.first else maximum(self.full_lo, first)
        full_hi = last if self.full_hi is self.last else minimum(self.full_hi, last)
        return Span(first, full_lo, full_hi, last)


@dataclass(frozen=True, eq=False)
class MaskProgram:
    """A traced mask.

    keep: a bool over the symbols b, h, q, k, len_q, len_k. span: first, full_lo, full_hi, last, clamped to 0..len_k,
    over b, h, q_lo, q_hi, len_q, len_k. key: identity of the code of both.
    """

    keep: Node
    span: tuple[Node, Node, Node, Node]
    tensors: tuple[Tensor, ...]
    key: ProgramKey

    def for_one_query(self) -> MaskProgram:
        """Return a simpler mask for sequences of one query. It sits at the last key, so no key is newer, and conditions
        like k <= q are dropped; if no other is left, the span says that all keys are visible."""
        keep, span = _without_newer(self.keep), self.span
        if keep.is_constant and keep.value:
            first = const(0, "int")
            span = (first, first, _LEN_K, _LEN_K)
        return MaskProgram(keep, span, self.tensors, Program((keep, *span), self.tensors).key)


def _without_newer(keep: Node) -> Node:
    """Drop conditions like k <= q, for queries that sit at the last key."""
    if keep.op in ("and", "or"):
        return build(keep.op, keep.dtype, *map(_without_newer, keep.operands))
    return const(True, "bool") if (keep.op, *keep.operands) in (("le", _K, _Q), ("ge", _Q, _K)) else keep
