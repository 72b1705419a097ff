"""Random inputs of a case, the same for every peer: contiguous (batch, seq, heads, dim) tensors from a seed."""

from __future__ import annotations

import torch

from bench.cases import Case

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def default_device() -> torch.device:
    """The GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make(case: Case, device: torch.device, seed: int) -> QKV:
    """q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv), normally distributed, in the case's dtype."""
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def draw(seq: int, heads: int, dim: int) -> torch.Tensor:
        shape = (case.batch, seq, heads, dim)
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    return (
        draw(case.seq_q, case.heads_q, case.dim),
        draw(case.seq_k, case.heads_kv, case.dim),
        draw(case.seq_k, case.heads_kv, case.dim_v),
    )
