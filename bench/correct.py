"""Is a peer's output right? Every element against fp32, with what same-dtype PyTorch gets wrong as the yardstick.

The rule of the field: at most twice the error that PyTorch makes in the same dtype on the same inputs, plus what
rounding the result costs. Beside the largest error we compare the relative error of every block of 128 rows of every
head: one wrong key tile in one row block of a 16k sequence is far below the largest error allowed, and far above this.
The expected output is computed here in plain torch, in chunks of rows, so that it shares no code with what is timed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.cases import Case
from bench.measure.inputs import QKV

BLOCK = 128  # rows of one block of the relative error
SCORES = 1 << 27  # elements of the fp32 score matrix held at once (half a GiB)


@dataclass(frozen=True)
class Error:
    """`largest`: max |out − expected|. `block`: the worst relative error ‖·‖/‖·‖ over (batch, 128 rows, head)."""

    largest: float
    block: float


@dataclass(frozen=True)
class Expected:
    """The fp32 output (B, Sq, Hq, Dv) of a case and the errors that still count as right."""

    out: torch.Tensor
    limit: Error


def expected(case: Case, qkv: QKV) -> Expected:
    """Computes the fp32 output and the limits; needs about 3 GiB beside the inputs for the large cases."""
    out = _torch_attention(case, qkv, torch.float32)
    same = error(_torch_attention(case, qkv, qkv[0].dtype), out)
    rounding = ((out.to(qkv[0].dtype) + 0.3 - 0.3).float() - out.to(qkv[0].dtype).float()).abs().max().item()
    return Expected(out, Error(2 * same.largest + 2 * rounding, 2 * same.block))


def error(out: torch.Tensor, want: torch.Tensor) -> Error:
    """Both errors of `out` (any float dtype) against `want` (fp32), both (B, S, H, D); NaN where `out` has it."""
    difference = out.float() - want
    pad = (0, 0, 0, 0, 0, -want.shape[1] % BLOCK)
    wrong, size = (torch.nn.functional.pad(t, pad).unflatten(1, (-1, BLOCK)) for t in (difference, want))
    norm = size.pow(2).sum((2, 4)).sqrt()  # [B, blocks, H]
    relative = wrong.pow(2).sum((2, 4)).sqrt() / norm.clamp_min(1e-20)
    # max() of a tensor with NaN is NaN, which no limit admits.
    return Error(difference.abs().max().item(), relative.max().item())


def verdict(case: Case, out: torch.Tensor, want: Expected) -> tuple[Error | None, str | None]:
    """(the errors, None) when `out` is right, else (the errors if they exist, why not in one line)."""
    shape = (case.batch, case.seq_q, case.heads_q, case.dim_v)
    if tuple(out.shape) != shape:
        return None, f"the output has shape {tuple(out.shape)}, expected {shape}"
    found = error(out, want.out)
    for name, value, limit in (
        ("largest error", found.largest, want.limit.largest),
        ("worst relative error of a block of 128 rows", found.block, want.limit.block),
    ):
        if not value <= limit:  # also refuses NaN
            return found, f"{name} is {value:.3g}, allowed {limit:.3g}"
    return found, None


def poison(like: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Leaves NaN in freed memory of the output's size, so that an unwritten element shows in the comparison."""
    torch.full(shape, float("nan"), dtype=like.dtype, device=like.device)


def _visible(case: Case, rows: torch.Tensor) -> torch.Tensor:
    """[rows, Sk] bool: which keys these rows see, bottom-right aligned."""
    keys = torch.arange(case.seq_k, device=rows.device)
    position = rows[:, None] + case.seq_k - case.seq_q
    visible = keys[None, :] <= position if case.causal else torch.ones_like(position < keys[None, :])
    if case.documents > 1:
        length = case.seq_q // case.documents
        visible &= position // length == keys[None, :] // length
    return visible if case.window is None else visible & (position - keys[None, :] < case.window)


def _torch_attention(case: Case, qkv: QKV, dtype: torch.dtype) -> torch.Tensor:
    """softmax(QKᵀ/√D)V with every intermediate in `dtype`, over chunks of rows; (B, Sq, Hq, Dv) in fp32."""
    group = case.heads_q // case.heads_kv
    # [B, Hkv, group, S, D]: grouped heads share K and V by broadcasting.
    q = qkv[0].to(dtype).unflatten(2, (case.heads_kv, group)).permute(0, 2, 3, 1, 4)
    k, v = (t.to(dtype).transpose(1, 2).unsqueeze(2) for t in qkv[1:])
    shape = (case.batch, case.seq_q, case.heads_q, case.dim_v)
    out = torch.empty(shape, dtype=torch.float32, device=q.device)
    chunk = max(1, SCORES // (case.batch * case.heads_q * case.seq_k))
    for start in range(0, case.seq_q, chunk):
        rows = torch.arange(start, min(start + chunk, case.seq_q), device=q.device)
        scores = (q[..., start : start + chunk, :] * case.dim**-0.5) @ k.mT  # [B, Hkv, group, rows, Sk]
        if case.softcap:
            scores = case.softcap * (scores / case.softcap).tanh()
        if case.causal or case.documents > 1:
            scores = scores.masked_fill(~_visible(case, rows), float("-inf"))
        weights = scores.softmax(-1).nan_to_num(0.0)  # a row without keys gives 0
        out[:, start : start + chunk] = (weights @ v).permute(0, 3, 1, 2, 4).flatten(2, 3).float()
    return out
