"""8-bit values with scales: `Quantized`, quantising and dequantising with torch operations, and the rules of scales.

    value of an element = values · scale        scale fp32, of the whole tensor or finer, multiplied in fp32

    per "tensor"   scale ()
    per "head"     scale (heads,)
    per "token"    scale (…, heads)             of each head of each token
    per 64, 128    scale (…, heads, blocks)     of each block of 64 or 128 columns of each head of each token
    per "64 rows", "128 rows"   scale (…, blocks, heads)   of each block of tokens of a head; q and k of dense batches

The formats are e4m3 and e5m2 as OCP defines them (`float8_e4m3fn`, `float8_e5m2`) and as gfx942 has them (`…fnuz`).
Conversions saturate: numbers that are too large become the largest finite value, so finite numbers never become NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from warpattn.errors import Rules
from warpattn.inputs import is_tensor, kind_of, tensor_fault
from warpattn.torch_modes import is_recorded, without_autocast

__all__ = ["EIGHT_BIT", "GRANULARITIES", "ROW_BLOCKS", "Hadamard", "Quantized", "check_quantize", "check_scale",
           "check_scale_values", "check_transposed", "dequantized", "granularity", "quantize", "result_dtype",
           "saturated", "split", "transposed_shape", "transposed_values"]  # fmt: skip

EIGHT_BIT = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
BLOCKS = (64, 128)  # columns
GRANULARITIES = ("tensor", "head", "token", *BLOCKS)
ROW_BLOCKS = {"64 rows": 64, "128 rows": 128}  # tokens; the last block of a sequence may have fewer
KEYS_OF_PRODUCT = 32  # k of one 8-bit wgmma
LEAST_SCALE = torch.finfo(torch.float32).tiny  # a denormal scale would have fewer bits


@dataclass(frozen=True, eq=False)
class Quantized:
    """8-bit values and their scale, passed instead of a tensor as k and v, or as q, k and v.

    values (…, heads, dim), of a dtype in `EIGHT_BIT`. scale fp32, positive and finite, of shape (), (heads,),
    values.shape[:-1] or (*values.shape[:-1], blocks) with blocks of 64 or 128 columns; for q and k of dense batches
    also (batch, blocks, heads) with blocks of 64 or 128 tokens. transposed: values of dense v once more, as
    `transposed_values` makes them; products of 8 bits on Hopper read them instead of transposing in each call, all
    else ignores them. The call that gets it checks it.
    """

    values: Tensor
    scale: Tensor
    transposed: Tensor | None = None

    def dequantized(self) -> Tensor:
        """Return values · scale in fp32. Raises AttentionError listing every broken rule."""
        rules = Rules()
        if _check_columns(rules, "values", self.values, "heads", "head_dim"):
            check_scale(rules, "scale", self.scale, "values", self.values.shape, of_rows=self.values.ndim >= 4)
        rules.done()
        return dequantized(self.values, self.scale)


@dataclass(frozen=True)
class Hadamard:
    """Rotates heads by an orthogonal Hadamard matrix, which spreads an outlier over all columns of its block. A block
    is the largest power of two that divides the head dim; each block of a head is rotated by itself. If both q and k
    are rotated, scores do not change; if values are rotated, so is the result."""

    def applied(self, x: Tensor) -> Tensor:
        """Return x (…, dim) rotated, in fp32. Raises AttentionError if x is no tensor of real numbers with columns."""
        rules = Rules()
        _check_columns(rules, "x", x, "head_dim")
        rules.done()
        size = x.shape[-1] & -x.shape[-1]
        with without_autocast(x.device):
            return (x.float().unflatten(-1, (-1, size)) @ _hadamard_matrix(size, x.device)).flatten(-2)


def _check_columns(rules: Rules, name: str, x: Tensor, *axes: str) -> bool:
    """Require x to be a tensor of real numbers whose last dimensions are `axes`, with at least one column."""
    if not is_tensor(x):
        fault = tensor_fault(x)
        rules.add(f"{name} {fault.what}" if fault else f"{name} is {kind_of(x)}", f"{name} must be a torch.Tensor")
        return False
    fine = x.ndim >= len(axes) and x.shape[-1] > 0 and not x.is_complex()
    return rules.require(fine, f"{name} is {kind_of(x)}", f"{name} must be real numbers (…, {', '.join(axes)})")


def _hadamard_matrix(size: int, device: torch.device) -> Tensor:
    """Return the orthogonal Hadamard matrix, fp32 (size, size), of a power of two; cached except in compiled graphs,
    dispatch modes and captures, which own their memory."""
    if is_recorded() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return _make_hadamard_matrix(size, device)
    with torch.inference_mode(False):
        return _kept_hadamard_matrix(size, device)


def _make_hadamard_matrix(size: int, device: torch.device) -> Tensor:
    number = torch.arange(size, device=device)
    both, odd = number[:, None] & number, torch.zeros(size, size, dtype=torch.int64, device=device)
    for bit in range(size.bit_length()):
        odd ^= both >> bit & 1
    return (1 - 2 * odd).float() * size**-0.5


_kept_hadamard_matrix = cache(_make_hadamard_matrix)


def quantize(
    x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, *, per: str | int = "tensor", scale: Tensor | None = None,
    transposed: bool = False,
) -> Quantized:  # fmt: skip
    """Quantise x (…, heads, dim) to 8-bit values with scales by torch operations. This is the specification of
    `serving.quantizing.quantize`."""
    check_quantize(x, dtype, per, scale, transposed)
    scale = _scales(x, dtype, per) if scale is None else scale
    values = saturated(x.float() / _spread(scale, x.shape), dtype)
    return Quantized(values, scale, transposed_values(values) if transposed else None)


def transposed_values(values: Tensor) -> Tensor:
    """Return 8-bit values (batch, keys, heads, dim) as (batch, heads, dim, places), contiguous: wgmma needs the summed
    index of P·V in neighbouring bytes. Every 32 keys are in the order of the weights
    (kernels/sm90/prefill/eight_bit/weights.py), and places past the last key are 0."""
    bits = values.detach().view(torch.uint8)
    whole = torch.nn.functional.pad(bits, (0, 0, 0, 0, 0, -bits.shape[1] % KEYS_OF_PRODUCT))
    keys = whole.unflatten(1, (-1, 2, 4, 2))  # 16 j + 8 e + 2 t + b goes to 16 j + 4 t + 2 e + b
    return keys.permute(0, 5, 6, 1, 3, 2, 4).flatten(3).contiguous().view(values.dtype)


def transposed_shape(shape: torch.Size) -> tuple[int, ...]:
    """Return the shape of `transposed_values` of values of `shape`."""
    batch, keys, heads, dim = shape
    return (batch, heads, dim, keys + -keys % KEYS_OF_PRODUCT)


def check_transposed(rules: Rules, name: str, x: object, values: Tensor) -> None:
    """Check dtype, shape and layout of the transposed form of dense 8-bit `values`."""
    wanted = (values.dtype, transposed_shape(values.shape))
    if is_tensor(x) and (x.dtype, x.shape) == wanted and x.is_contiguous():
        return
    what = f" with strides {x.stride()}" if isinstance(x, Tensor) and not x.is_contiguous() else ""
    rule = "it must be None or a contiguous {} tensor of shape {}".format(*wanted)
    rules.add(f"{name} is {kind_of(x)}{what}", f"for v of shape {tuple(values.shape)} {rule}")


def check_quantize(
    x: Tensor, dtype: torch.dtype, per: str | int, scale: Tensor | None, transposed: bool = False
) -> None:
    """Check the arguments of `quantize`; raises AttentionError listing every broken rule."""
    rules = Rules()
    fault = None if is_tensor(x) else tensor_fault(x)
    kinds = (torch.float16, torch.bfloat16, torch.float32)
    eight = isinstance(dtype, torch.dtype) and dtype in EIGHT_BIT
    rules.require(eight, f"dtype is {kind_of(dtype)}", f"dtype must be one of {_listed(EIGHT_BIT)}")
    allowed = (*GRANULARITIES, *ROW_BLOCKS)
    known = isinstance(per, str | int) and per in allowed
    rules.require(known, f"per is {kind_of(per)}", f"per must be one of {_listed(allowed)}")
    if fault is not None:
        rules.add(f"x {fault.what}", f"x {fault.rule}")
    else:
        rules.require(x.dtype in kinds, f"x has dtype {x.dtype}", f"x must be one of {_listed(kinds)}")
        rules.require(x.ndim >= 2, f"x has shape {tuple(x.shape)}", "x must have at least (heads, head_dim)")
    rules.done()
    # Text of sizes that torch keeps open cannot be traced.
    if per in BLOCKS and (not x.shape[-1] or x.shape[-1] % int(per)):
        rules.add(f"x has head_dim {x.shape[-1]}", f"per={per} needs a multiple of {per} above 0")
    if per in ROW_BLOCKS:
        rules.require(x.ndim >= 4, f"x has shape {tuple(x.shape)}", f"per={per} needs (batch, tokens, heads, head_dim)")
    rules.done()
    if scale is not None:
        fine = check_scale(rules, "scale", scale, "x", x.shape, of_rows=x.ndim >= 4)
        if fine and scale.device.type == "cpu" and not is_recorded():
            check_scale_values(rules, "scale", scale)
    if not isinstance(transposed, bool):
        rules.flag("transposed", transposed)
    elif transposed:
        _check_transposing(rules, x, dtype, per, scale)
    rules.done()


def _check_transposing(rules: Rules, x: Tensor, dtype: torch.dtype, per: str | int, scale: Tensor | None) -> None:
    """Require what products of 8 bits on Hopper take as v."""
    needs = "transposed=True needs"
    rules.require(dtype == torch.float8_e4m3fn, f"dtype is {dtype}", f"{needs} torch.float8_e4m3fn")
    if scale is None:
        rules.require(per in ("tensor", "head"), f"per is {kind_of(per)}", f"{needs} per to be 'tensor' or 'head'")
    elif isinstance(scale, Tensor) and scale.ndim > 1:
        rules.add(f"scale has shape {tuple(scale.shape)}", f"{needs} a scale of shape () or (heads,)")
    if x.ndim != 4 or x.shape[-1] % 16:
        rule = f"{needs} (batch, tokens, heads, head_dim) with a multiple of 16 as head_dim"
        rules.add(f"x has shape {tuple(x.shape)}", rule)


def _scales(x: Tensor, dtype: torch.dtype, per: str | int) -> Tensor:
    """Return scales with which `x` uses the whole range of `dtype`."""
    size = x.detach().float().abs()
    size = size.masked_fill(~size.isfinite(), 0.0)
    if isinstance(per, int):
        size = size.unflatten(-1, (-1, per)).amax(-1)
    elif size.numel() == 0:
        shape = {"tensor": (), "head": x.shape[-2:-1], "token": x.shape[:-1]}
        shape = shape[per] if per in shape else _of_rows(x.shape, ROW_BLOCKS[per])
        return x.new_ones(shape, dtype=torch.float32)
    elif per in ROW_BLOCKS:
        rows = ROW_BLOCKS[per]
        whole = torch.nn.functional.pad(size.amax(-1), (0, 0, 0, -x.shape[-3] % rows))
        size = whole.unflatten(-2, (-1, rows)).amax(-2)
    elif per == "token":
        size = size.amax(-1)
    else:
        size = size.amax() if per == "tensor" else size.movedim(-2, 0).flatten(1).amax(1)
    largest = size.new_full((), torch.finfo(dtype).max)  # GPUs would multiply by a number's inverse
    scale = (size / largest).clamp_min(LEAST_SCALE).masked_fill(size == 0, 1.0)
    if per == "token":  # contiguous along the tokens of a head: kernels read the scales of one head
        return scale.movedim(-1, 0).contiguous().movedim(0, -1)
    return scale


def _of_rows(shape: torch.Size, rows: int) -> tuple[int, ...]:
    """Return the shape of a scale per block of `rows` tokens, for values of `shape` (…, tokens, heads, dim)."""
    return (*shape[:-3], -(-shape[-3] // rows), shape[-2])


def saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp32 values to an 8-bit format, to nearest even; those out of range become its largest, NaN stays NaN."""
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def dequantized(values: Tensor, scale: Tensor | None) -> Tensor:
    """Return values (…, heads, dim) · scale in fp32; without a scale the values themselves."""
    return values if scale is None else values.float() * _spread(scale, values.shape)


def _spread(scale: Tensor, shape: torch.Size) -> Tensor:
    """Expand a scale so that it broadcasts to values of `shape`."""
    if scale.ndim < 2:
        return scale[:, None] if scale.ndim else scale
    per = granularity(scale, shape)
    if per in ROW_BLOCKS:
        scale = scale.repeat_interleave(ROW_BLOCKS[per], -2)[..., : shape[-3], :]
    scale = scale if scale.ndim == len(shape) else scale[..., None]
    return scale.repeat_interleave(shape[-1] // scale.shape[-1], -1) if scale.shape[-1] > 1 else scale


def granularity(scale: Tensor | None, shape: torch.Size) -> str | int | None:
    """Return the granularity of a checked scale for values of `shape` (…, heads, dim), an entry of `GRANULARITIES` or
    `ROW_BLOCKS`; None without a scale. Where a shape fits several, one block of tokens counts as "64 rows" and a
    single token as "token"; the numbers are the same (`Problem.block_scales`)."""
    if scale is None:
        return None
    if scale.ndim < 2:
        return "head" if scale.ndim else "tensor"
    if scale.ndim < len(shape) and scale.shape != shape[:-1]:
        return next(per for per, rows in ROW_BLOCKS.items() if scale.shape == _of_rows(shape, rows))
    blocks = 1 if scale.ndim < len(shape) else scale.shape[-1]
    return "token" if blocks == 1 else shape[-1] // blocks


def check_scale(
    rules: Rules, name: str, scale: object, values_name: str, shape: torch.Size, of_rows: bool = False
) -> bool:
    """Check dtype and shape of a scale for values of `shape` (…, heads, dim); `of_rows`: may be per block of rows."""
    fault = tensor_fault(scale) if not is_tensor(scale) else None
    if fault is not None or not isinstance(scale, Tensor):
        none = " or None" * (not isinstance(scale, Tensor))
        rule = f"{name} {fault.rule if fault else 'must be a torch.Tensor'}{none}"
        rules.add(f"{name} {fault.what if fault else 'is ' + kind_of(scale)}", rule)
        return False
    ok = rules.require(scale.dtype == torch.float32, f"{name} has dtype {scale.dtype}", f"{name} must be torch.float32")
    blocks = [(*shape[:-1], shape[-1] // size) for size in BLOCKS if shape[-1] and shape[-1] % size == 0]
    allowed: list[tuple[int, ...]] = [(), (shape[-2],), tuple(shape[:-1]), *blocks]
    allowed += [_of_rows(shape, rows) for rows in ROW_BLOCKS.values() if of_rows]
    if tuple(scale.shape) in allowed:
        return ok
    what, listed = f"{name} has shape {tuple(scale.shape)}", ", ".join(map(str, dict.fromkeys(allowed)))
    return rules.require(False, what, f"for {values_name} of shape {tuple(shape)} it must be one of {listed}")


def check_scale_values(rules: Rules, name: str, scale: Tensor | None, used: Tensor | None = None) -> None:
    """Require the values of a scale to be positive and finite; of pages where `used` (num_pages, page_size) is True."""
    if scale is None:
        return
    fine = scale.detach().isfinite() & (scale.detach() > 0)
    if used is not None:
        fine = fine | ~used[(..., *[None] * (fine.ndim - used.ndim))]
    if not bool(fine.all()):
        at = tuple((~fine).nonzero()[0].tolist())
        index = f"[{', '.join(map(str, at))}]" if at else ""
        rules.add(f"{name}{index} is {float(scale[at])}", "a scale must be positive and finite")


def split(x: Tensor | Quantized) -> tuple[Tensor, Tensor | None]:
    """Return values and scale of an argument that is a tensor or a `Quantized`."""
    return (x.values, x.scale) if isinstance(x, Quantized) else (x, None)


def result_dtype(q: torch.dtype, out: torch.dtype | None = None) -> torch.dtype:
    """Return the dtype of the result for queries of dtype `q`: the same; for 8-bit ones `out` if given, else bf16."""
    return (torch.bfloat16 if out is None else out) if q in EIGHT_BIT else q


def rows_of_pages(pages: Tensor, scale: Tensor | None, used: Tensor, length: int) -> Tensor:
    """Return the first `length` keys or values (Sk, Hkv, dim) of the pages `used`, in fp32 if they have a scale."""
    scale = scale[used].flatten(0, 1)[:length] if scale is not None and scale.ndim > 1 else scale
    return dequantized(pages[used].flatten(0, 1)[:length], scale)


def _listed(values: tuple[object, ...]) -> str:
    return ", ".join(str(value) for value in values)
