"""The launch that transposes values before a prefill with 8-bit products. This file imports no Triton."""

from __future__ import annotations

from torch import Tensor

from warpattn.problem.arch import compile_options
from warpattn.problem.launch import Launch

from ....nvidia.arguments import strided
from ...arguments import KEYS_OF_PRODUCT, TRANSPOSED_KEYS, TransposeShape
from ..config import pad_dim


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
