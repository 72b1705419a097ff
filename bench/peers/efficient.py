"""torch's memory-efficient attention: the only kernels of its scaled_dot_product_attention for head dims above 256."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn.attention import SDPBackend

from bench.cases import Case
from bench.peers.adapter import Call, Unsupported, no_gpu, top_left_causal, unmodified
from bench.peers.cudnn import sdpa_call


class MemoryEfficient:
    """torch SDPA restricted to its memory-efficient backend."""

    name = "efficient"

    def available(self) -> str | None:
        """Needs a GPU."""
        return no_gpu()

    def version(self) -> str:
        """torch's version; the kernels are its own."""
        return f"memory-efficient attention of torch {torch.__version__}"

    def prepare(self, case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
        """SDPA over transposed views. It has no groups: keys and values are repeated for each query head before any
        call is timed."""
        unmodified(case)
        if case.window is not None:
            raise Unsupported("torch's SDPA has no window")
        top_left_causal(case)
        group = case.heads_q // case.heads_kv
        if group > 1:
            k, v = (t.repeat_interleave(group, 2) for t in (k, v))
        return sdpa_call(SDPBackend.EFFICIENT_ATTENTION, replace(case, heads_kv=case.heads_q), (q, k, v))
