"""The launch that appends new keys and values to a paged cache."""

from __future__ import annotations

from torch import Tensor

from warpattn.problem.arch import compile_options
from warpattn.problem.element import element_of
from warpattn.problem.launch import Launch
from warpattn.sequences import PagedKV

from .config import HEADS, AppendShape, Rotation, Rows, Table


def append_launches(
    arch: str, kv: PagedKV, k_new: Tensor, v_new: Tensor, angles: tuple[Tensor, Tensor] | None, interleaved: bool
) -> tuple[Launch, ...]:
    """One launch on an architecture; `angles` are cosines and sines (positions, rotated dims / 2), the last stride of
    all tensors is 1."""
    batch, tokens, heads, dim = k_new.shape
    rotation = None if angles is None else Rotation(2 * angles[0].shape[1], interleaved)
    dims = (dim, v_new.shape[3])
    table = kv.block_table
    shape = AppendShape(tokens, heads, len(kv.k_pages), kv.k_pages.shape[1], table.shape[1])
    cos, sin = (Table(None, 0), Table(None, 0)) if angles is None else (Table(x, x.stride(0)) for x in angles)
    args = {
        "k_pages": _rows(kv.k_pages), "v_pages": _rows(kv.v_pages), "k_new": _rows(k_new), "v_new": _rows(v_new),
        "table": Table(table, table.stride(0)), "lengths": kv.lengths, "cos": cos, "sin": sin, "shape": shape,
    }  # fmt: skip
    dtype = element_of(k_new.dtype).name
    table_dtype = dtype if angles is None else element_of(angles[0].dtype).name

    def source():
        from .signature import append_source  # imports Triton

        return append_source(dtype, table_dtype, dims, rotation, arch)

    key = (dtype, table_dtype, dims, rotation)
    grid = (batch * tokens, -(-heads // HEADS))
    return (Launch(f"{arch}.append", arch, key, source, compile_options(), grid, args),)


def _rows(x: Tensor) -> Rows:
    return Rows(x, *x.stride()[:3])
