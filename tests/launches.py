"""Small calls, whose launches tests compile with configurations of their own."""

from __future__ import annotations

from typing import NamedTuple

import torch

from warpattn.masks import Causal, Mask
from warpattn.problem import Call, CheckedCall, validate
from warpattn.problem.element import BF16, Element
from warpattn.problem.launch import Choice
from warpattn.problem.operands import Operands
from warpattn.scores import Score
from warpattn.sequences import Dense, PagedKV, Ragged, Sequence

ROWS = 256


class SmallCall(NamedTuple):
    """A call of two heads, and more of queries, without values."""

    checked: CheckedCall
    x: Operands
    sequence: Sequence


def small_call(
    arch: str,
    dims: tuple[int, int],
    element: Element = BF16,
    *,
    kind: str = "dense",
    page: int = 0,
    rows: tuple[int, int] = (ROWS, ROWS),
    heads: tuple[int, int] = (2, 2),
    modifiers: tuple[Mask | None, Score | None] = (Causal(), None),
) -> SmallCall:
    """A call with an LSE. dims: of keys and values; kind: "dense", "ragged" or "paged"; rows, heads: of
    queries and of keys; modifiers: mask and score."""
    (dim_qk, dim_v), (heads_q, heads_kv), (queries, keys) = dims, heads, rows

    def tensor(count: int, heads: int, dim: int) -> torch.Tensor:
        return torch.zeros(*((count,) if kind == "ragged" else (1, count)), heads, dim, dtype=element.dtype)

    q, k, v = tensor(queries, heads_q, dim_qk), tensor(keys, heads_kv, dim_qk), tensor(keys, heads_kv, dim_v)
    sequence: Sequence = Dense()
    if kind == "ragged":
        sequence = Ragged(torch.tensor([0, 100, ROWS], dtype=torch.int32))
    if kind == "paged":
        k, v = (x.new_zeros(ROWS // page + 1, page, *x.shape[2:]) for x in (k, v))
        table = torch.zeros(1, len(k), dtype=torch.int32)
        sequence = PagedKV(k, v, table, torch.tensor([ROWS], dtype=torch.int32))
    call = Call(q, k, v, sequence, *modifiers, return_lse=True, backend=f"simulate:{arch}")
    checked = validate(call, read_values=False)
    out, lse = tensor(queries, heads_q, dim_v), torch.zeros(checked.lse_shape)
    return SmallCall(checked, Operands(q, k, v, out, lse, None), sequence)


def choice_of(config: object, partitions: int = 1) -> Choice:
    """A choice of one program."""
    return Choice("kernel", config, (1, 1, 1), tuple, (), partitions)
