"""The launch that appends new keys and values to a paged cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from warpattn.problem.arch import compile_options
from warpattn.problem.argument_types import argument_types
from warpattn.problem.element import element_of
from warpattn.problem.launch import Launch
from warpattn.quantized import granularity
from warpattn.sequences import PagedKV

from .config import (
    VECTOR,
    AppendConfig,
    AppendShape,
    BlockScales,
    EightBitPages,
    Rotation,
    Rows,
    ScaledRows,
    SlotArgs,
    Table,
    TableArgs,
    rows_of_program,
)

Scales = tuple[Tensor | None, Tensor | None]


class NewRows(NamedTuple):
    """What is written, how keys are rotated, and the scales of 8-bit pages."""

    k: Tensor  # (sequences, tokens, heads, dim), or (tokens, heads, dim) for slots
    v: Tensor | None
    angles: tuple[Tensor, Tensor] | None  # cosines and sines (positions, rotated dims / 2)
    interleaved: bool
    scales: Scales = (None, None)


class Places(NamedTuple):
    """What gives new tokens their places in the cache."""

    arguments: TableArgs | SlotArgs  # of the kernel
    tokens: int  # of all sequences
    table_pages: int = 0  # of a table row


def append_launches(arch: str, kv: PagedKV, new: NewRows) -> tuple[Launch, ...]:
    """One launch on an architecture, places by block table and lengths; the last stride of all tensors is 1."""
    table, tokens = kv.block_table, new.k.shape[0] * new.k.shape[1]
    places = Places(TableArgs(Table(table, table.stride(0)), kv.lengths), tokens, table.shape[1])
    new = new._replace(scales=(kv.k_scale, kv.v_scale))
    return _launches(arch, "append", (kv.k_pages, kv.v_pages), new, places)


def slot_launches(
    arch: str, pages: tuple[Tensor, Tensor | None], slots: Tensor, positions: Tensor | None, new: NewRows
) -> tuple[Launch, ...]:
    """One launch on an architecture, places by slots, of as many tokens as there are; values may be None."""
    return _launches(arch, "append_slots", pages, new, Places(SlotArgs(slots, positions), len(slots)))


def _launches(
    arch: str, name: str, pages: tuple[Tensor, Tensor | None], new: NewRows, places: Places
) -> tuple[Launch, ...]:
    """The launch of the kernel `name`."""
    *_, tokens, heads, dim = new.k.shape
    element = element_of(new.k.dtype)
    dims = (dim,) if new.v is None else (dim, new.v.shape[-1])
    rows = rows_of_program(dims, element.bytes)
    k_pages, v_pages = pages
    tensors = {"k_pages": k_pages, "v_pages": v_pages, "k_new": new.k, "v_new": new.v}
    run = run_of([x for x in tensors.values() if x is not None], element.bytes)
    cos, sin = new.angles or (None, None)
    rotation = None if cos is None else Rotation(2 * cos.shape[1], new.interleaved)
    stored = element_of(k_pages.dtype)
    eight_bit = None
    if stored.bytes == 1:
        pairs = zip(new.scales, pages, strict=True)
        given = tuple(None if x is None else granularity(scale, x.shape) for scale, x in pairs)
        eight_bit = EightBitPages(torch.finfo(stored.dtype).max, given)
    config = AppendConfig(dims, rows, run, rotation, eight_bit)
    count = places.tokens * heads
    shape = AppendShape(count, tokens, heads, *k_pages.shape[:2], places.table_pages)
    args = {key: _rows(x, run) for key, x in tensors.items()} | {"places": places.arguments, "shape": shape}
    if eight_bit is not None:
        named = zip(("k_pages", "v_pages"), new.scales, eight_bit.scales, strict=True)
        args |= {key: _scaled(args[key], scale, per) for key, scale, per in named}
    for key, angle in (("cos", cos), ("sin", sin)):
        args[key] = Table(angle, 0 if angle is None else angle.stride(0))

    def source():
        from .signature import append_source  # imports Triton

        return append_source(args, config, arch)

    key = (tuple(argument_types(args).values()), config)
    return (Launch(f"{arch}.{name}", arch, key, source, compile_options(), (-(-count // rows),), args),)


def run_of(tensors: list[Tensor], size: int) -> int:
    """Elements of `size` bytes of which the rows of all tensors are multiples: those of a vector, or 1."""
    run = VECTOR // size
    even = all(
        x.data_ptr() % VECTOR == 0
        and all(stride % run == 0 or n <= 1 for n, stride in zip(x.shape[:-1], x.stride(), strict=False))
        for x in tensors
    )
    return run if even else 1


def _scaled(rows: Rows, scale: Tensor | None, per: str | int | None) -> ScaledRows:
    """Pages with their scale, which belongs to `per`."""
    if scale is None or scale.ndim < 2:
        return ScaledRows(*rows, Rows(scale, 0, 0, scale.stride(0) if scale is not None and scale.ndim else 0))
    if isinstance(per, int):
        return ScaledRows(*rows, BlockScales(scale, *scale.stride()))
    return ScaledRows(*rows, Rows(scale, *scale.stride()[:3]))


def _rows(x: Tensor | None, run: int) -> Rows:
    if x is None:
        return Rows(None, 0, 0, 0)
    outer = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    strides = [stride // run if n > 1 else 0 for n, stride in outer]
    return Rows(x, *[0] * (3 - len(strides)), *strides)
