"""The launch that transposes values before a prefill with 8-bit products, unless v brings them transposed. This file
imports no Triton."""

from __future__ import annotations

from torch import Tensor

from warpattn.problem import Problem
from warpattn.problem.arch import compile_options
from warpattn.problem.launch import Launch, TensorMap
from warpattn.problem.operands import ALIGNMENT
from warpattn.quantized import KEYS_OF_PRODUCT

from ....nvidia.arguments import strided
from ...arguments import TRANSPOSED_KEYS, TransposeShape
from ..config import SM90Config, pad_dim


def value_lines(problem: Problem, config: SM90Config) -> tuple[str, ...]:
    """What a plan says of the transposed values of 8-bit products."""
    if not config.products:
        return ()
    if problem.v_transposed:
        return ("v brings its transposed values: no launch before it",)
    moved = problem.batch * problem.seq_k * problem.heads_kv * config.dim_v
    return (f"sm90.transpose_values before it: {moved:,} bytes",)


def transposed_values(
    v: Tensor, brought: Tensor | None, config: SM90Config
) -> tuple[Tensor | TensorMap, tuple[Launch, ...]]:
    """(what the kernel of a dense batch reads instead of v, the launch that writes it unless it is `brought`)."""
    if brought is None:
        return transposed(v)
    brought = brought if brought.data_ptr() % ALIGNMENT == 0 else brought.clone()  # as `fitted` does
    batch, heads, dim, places = brought.shape
    box, strides = (1, config.v_rows, 1, config.block_n), (heads * dim * places, places, dim * places, 1)
    return TensorMap(brought, box, (batch, dim, heads, places), strides), ()


def transposed(v: Tensor, cu: Tensor | None = None) -> tuple[Tensor, tuple[Launch]]:
    """(transposed values (B, Dv, Hkv, places) in a workspace, the launch that writes them) of 8-bit v (B, Sk, Hkv, Dv).
    With offsets `cu`, v (total, Hkv, Dv) holds sequences end to end, each gets whole tiles of places, and B is 1."""
    *outer, keys, heads, dim = v.shape
    ragged, cols, batch = cu is not None, pad_dim(dim), outer[0] if outer else 1
    sequences = batch if cu is None else len(cu) - 1
    whole = (keys // TRANSPOSED_KEYS + sequences) * TRANSPOSED_KEYS
    places = whole if ragged else keys + -keys % KEYS_OF_PRODUCT
    blocks = places // KEYS_OF_PRODUCT
    out = v.new_empty(batch, heads, dim, places)
    shape = TransposeShape(keys, blocks, heads, dim // 16, sequences, sequences.bit_length())
    args = {"values": strided(v), "out_ptr": out, "cu_ptr": cu, "shape": shape}

    def source():
        from ..signature import transpose_values_source  # imports Triton

        return transpose_values_source(args, cols, ragged)

    grid = (batch * heads * -(-places // TRANSPOSED_KEYS),)
    launch = Launch("sm90.transpose_values", "sm90", (cols, ragged), source, compile_options(), grid, args)
    return out.transpose(1, 2), (launch,)
