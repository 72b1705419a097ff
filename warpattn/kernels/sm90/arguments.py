"""Named tuples that launches hand to the Hopper kernels. The launch fills in values, the signature types, and the
kernel reads fields by name, so that the order of the fields is stated once. Nothing here imports Triton."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from warpattn.problem.operands import run_strides

Fields = TypeVar("Fields", bound=tuple)
KEYS_OF_PRODUCT = 32  # that one wgmma of 8 bits sums over, and whose order is its own: see bytes.py
TRANSPOSED_KEYS = 128  # of a program of prefill/transpose_values.py


class StridedRows(NamedTuple):
    """A tensor (batch or page, token or row, head, dim): its strides, but the last, in runs of 8 elements, int64."""

    pointer: Any
    outer: Any  # from one batch entry or page to the next
    row: Any  # from one token or row to the next
    head: Any


class TransposeShape(NamedTuple):
    """The `shape` argument of prefill/transpose_values.py, int32."""

    keys: Any  # of every sequence
    blocks: Any  # of KEYS_OF_PRODUCT places in a row of the output
    heads: Any  # of keys
    columns: Any  # of the head dim, 16 at a time
    batch: Any  # sequences
    halvings: Any  # steps of a search among them


class PrefillShape(NamedTuple):
    """The `shape` argument of prefill, int32."""

    seq_q: Any
    seq_k: Any
    heads_q: Any
    group: Any  # query heads of a key head
    m_tiles: Any  # query tiles of a head
    heads: Any  # query heads of the whole batch
    section: Any  # query heads whose tiles the scheduler hands out together


class SplitShape(NamedTuple):
    """The same where keys of a tile are shared out."""

    seq_q: Any
    seq_k: Any
    heads_q: Any
    group: Any
    m_tiles: Any
    heads: Any
    section: Any
    batch: Any
    splits: Any  # parts of a tile


def strided(x: Tensor) -> StridedRows:
    """The argument for a tensor; its last stride is 1. Rows of ragged sequences (row, head, dim) have no outer one."""
    return StridedRows(x, *[0] * (4 - x.ndim), *run_strides(x))


def strided_types(pointer: str) -> StridedRows:
    """The types of such an argument, for a Triton type `pointer`."""
    return StridedRows(pointer, "i64", "i64", "i64")


def int32_fields(fields: type[Fields]) -> Fields:
    """The types of an argument whose fields are all int32."""
    return fields(*["i32"] * len(fields._fields))  # type: ignore[attr-defined]
