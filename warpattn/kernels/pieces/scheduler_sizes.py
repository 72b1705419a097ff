"""Sizes that tile schedulers, launches and configs share. This file imports no Triton."""

from typing import Any, NamedTuple

TILE_FIELDS = 3  # int32 of a dense tile in shared memory: batch, query head, first row
SPLIT_TILE_FIELDS = 4  # int32 of a split-KV part of a dense tile: also the part's number
VARLEN_TILE_FIELDS = 7  # int32 of a varlen tile: batch, query head, first row, first query, queries, keys, number
SPLIT_VARLEN_FIELDS = 8  # int32 of a split-KV part of a varlen tile: also the part's number
RECORD = 8  # int32 of a record of the tile list, and of the list's header
BLOCKS = 0  # index in the header: number of records
COUNTER = 1  # index in the header: tile counter
PROGRAM_BLOCKS = 32  # possible query blocks that one program of order_kernel places
ORDER_WARPS = 8  # warps of order_kernel, for which its layouts are made


class OrderShape(NamedTuple):
    """The `shape` argument of order_kernel, int32."""

    batch: Any
    seq_q: Any  # queries of every sequence; unused where `ragged`
    most_k: Any  # most keys of a sequence
    candidates: Any  # places where a query block may begin


class ListedSequences(NamedTuple):
    """The `only` argument of order_kernel: the ragged sequences that have blocks."""

    least_q: Any  # int32: they have at least so many queries, 1 or more
    ends: Any  # int32*: where the copies of each sequence's keys end, see `PlaceLists`; any pointer if `copied` is 0
    capacity: Any = 0  # int32: places for copies
    copied: Any = 0  # int32. 1: only sequences whose keys have copies; -1: only others; 0: all
