"""quantize: converts a tensor to 8-bit values with scales, on a card with kernels, else by quantized.py."""

from __future__ import annotations

import torch
from torch import Tensor

from warpattn.errors import AttentionError
from warpattn.inputs import kind_of
from warpattn.kernels.quantise.launch import Quantising, partial_sizes, quantise_launches
from warpattn.problem.backends import LIMITS, chip_of
from warpattn.problem.rules import is_differentiated
from warpattn.quantized import ROW_BLOCKS, Hadamard, Quantized, check_quantize, granularity, transposed_shape
from warpattn.quantized import quantize as with_torch
from warpattn.runtime.repeated_calls import RepeatedCalls
from warpattn.torch_modes import is_recorded

_calls = RepeatedCalls("quantize", rows=2)


def quantize(
    x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, *, per: str | int = "tensor", scale: Tensor | None = None,
    rotation: Hadamard | None = None, transposed: bool = False,
) -> Quantized:  # fmt: skip
    """Quantise x (…, heads, dim), fp16, bf16 or fp32, to 8-bit values with scales.

    per: "tensor", "head", "token" (each head of each token), or 64 or 128 columns of it; for q and k (batch, tokens,
    heads, dim) also "64 rows" or "128 rows" (each head of 64 or 128 tokens, by torch operations). A scale is the
    largest finite magnitude of its elements divided by the largest number of `dtype`, 1 where all are 0. `scale`, of
    any of these shapes, is used instead if given. Infinite elements saturate, NaN stays. `rotation` is applied to x
    first; use it for q and k alike. docs/eight_bit.md has a table of the errors to expect with and without.

    transposed: also make `Quantized.transposed` (batch, heads, dim, tokens rounded up to 32), for v (batch, tokens,
    heads, dim) of e4m3fn with a scale per tensor or head: products of 8 bits on Hopper then need no launch before.

    On a card with kernels for `dtype` this is one launch, two if it computes the scale of a tensor or a head.
    Elsewhere, in compiled graphs and where gradients flow, torch operations give the same bits. Raises AttentionError
    listing every broken rule.
    """
    check_quantize(x, dtype, per, scale, transposed)
    if not (rotation is None or isinstance(rotation, Hadamard)):
        raise AttentionError(f"rotation is {kind_of(rotation)}; it must be None or Hadamard()")
    x = x if rotation is None else rotation.applied(x)
    if per in ROW_BLOCKS or granularity(scale, x.shape) in ROW_BLOCKS or not _has_kernels(x, dtype, scale):
        return with_torch(x, dtype, per=per, scale=scale, transposed=transposed)
    made, call = arguments(x, dtype, per, scale, transposed)
    tensors = call[:-1]
    if not _calls.launched_again(tensors, call.given):
        _calls.launch(tensors, call.given, lambda arch: quantise_launches(arch, call))
    return made


def arguments(
    x: Tensor, dtype: torch.dtype, per: str | int, scale: Tensor | None, transposed: bool = False
) -> tuple[Quantized, Quantising]:
    """Allocate the result of a checked call; return it with the kernels' arguments (column blocks count as heads)."""
    given = scale is not None
    scales = _unwritten(x, per) if scale is None else scale
    values = torch.empty(x.shape, dtype=dtype, device=x.device)
    across = torch.empty(transposed_shape(x.shape), dtype=dtype, device=x.device) if transposed else None
    made, kind = Quantized(values, scales, across), granularity(scales, x.shape)
    if isinstance(kind, int):
        x, values = (t.unflatten(-1, (-1, kind)).flatten(-3, -2) for t in (x, values))
        scales = scales.flatten(-2)
    elif kind == "token" and scales.ndim == x.ndim:  # one block
        scales = scales.squeeze(-1)
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    x, values = _with_rank(x, 4), _with_rank(values, 4)
    per_row = kind == "token" or isinstance(kind, int)
    scales = _with_rank(scales, 3) if per_row else scales
    if all(_in_one_piece(t) for t in ((x, scales) if per_row else (x,))):
        x, values, scales = (t.flatten(0, 1)[None] if t.ndim > 2 else t for t in (x, values, scales))
    sizes = None if given or scales.ndim == 3 else partial_sizes(x)
    return made, Quantising(x, values, scales, sizes, across, given)


def _unwritten(x: Tensor, per: str | int) -> Tensor:
    """Allocate scales, contiguous along the tokens of a head: kernels read the scales of one head."""
    *outer, heads, dim = x.shape
    if isinstance(per, int):
        shape = (*outer, heads, dim // per)
    else:
        shape = {"tensor": (), "head": (heads,), "token": (heads, *outer)}[per]
    scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    return scale.movedim(0, -1) if per == "token" else scale


def _in_one_piece(x: Tensor) -> bool:
    """Whether all tokens of x (sequences, tokens, …) are equally far apart."""
    return len(x) == 1 or x.shape[1] == 1 or x.stride(0) == x.shape[1] * x.stride(1)


def _with_rank(x: Tensor, rank: int) -> Tensor:
    """Flatten x's first dimensions, or add some of one element, to get `rank`."""
    missing = max(rank - x.ndim, 0)
    return x[(None,) * missing].flatten(0, max(x.ndim - rank, 0))


def _has_kernels(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> bool:
    """Whether kernels can quantise a checked tensor."""
    if is_recorded() or type(x) is not Tensor or not x.is_cuda or x.numel() == 0:
        return False
    if is_differentiated([x]):
        return False
    arch = chip_of(x.device).arch
    limits = None if arch is None else LIMITS[arch].eight_bit
    return limits is not None and dtype in limits.dtypes and (scale is None or scale.device == x.device)
