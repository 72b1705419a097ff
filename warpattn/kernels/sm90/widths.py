"""Cuts the columns of a head dim: pads them, splits them into powers of two, or into blocks with a launch each."""

from __future__ import annotations

from functools import cache

from warpattn.problem.operands import whole_runs

LEAST_PART = 16  # columns of the narrowest part: the k of wgmma
MOST_VALUES = 256  # columns of values in one launch: their accumulator has 128 registers a thread


@cache
def pad_dim(dim: int) -> int:
    """Head dim rounded up to a power of two, at least 32, as TMA boxes and register tensors need it."""
    return max(32, 1 << (dim - 1).bit_length())


@cache
def split_dim(dim: int) -> tuple[int, ...]:
    """Widths of the parts of a head dim, powers of two that add up to it or to a little more: 192 is 128 and 64.

    Head dims up to 32 and from 49 to 64 stay one part, because exponentials take longer than products there. So do
    those whose parts would not be faster: 112 columns in three took 1.06 times as long as 128 (H200).
    """
    whole = pad_dim(dim)
    columns = -(-dim // LEAST_PART) * LEAST_PART
    parts = tuple(width for width in (256, 128, 64, 32, LEAST_PART) if columns & width)
    return parts if whole >= 64 and columns < whole and len(parts) <= (2 if whole == 128 else 3) else (whole,)


@cache
def split_values(dim: int) -> tuple[int, ...]:
    """Widths of the parts of values; at most one is below 64.

    In P·V wgmma reads P from registers, and 16 or 32 columns then take as long as 64 (bench/notes.md, 222). So parts of
    32 and 16 columns become one of 64: 48 columns need one product instead of two, 176 two instead of three.
    """
    parts = split_dim(dim)
    return (*parts[:-2], 64) if parts[-2:] == (32, LEAST_PART) else parts


@cache
def value_blocks(dim_v: int) -> tuple[int, ...]:
    """First columns of the blocks of `block_columns(dim_v)` values that launches have."""
    return (0,) if dim_v <= MOST_VALUES else (0, dim_v - block_columns(dim_v))


@cache
def block_columns(dim_v: int) -> int:
    """Columns of a block of values, a whole number of runs; two blocks may overlap."""
    return dim_v if dim_v <= MOST_VALUES else whole_runs(-(-dim_v // 2))


@cache
def block_words(dim_v: int) -> tuple[str, ...]:
    """Why values have several launches; () if they have one."""
    count, columns = len(value_blocks(dim_v)), block_columns(dim_v)
    return (f"values of > {MOST_VALUES} columns: {count} launches of {columns}, each with all scores",) * (count > 1)
