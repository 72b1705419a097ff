"""cuDNN's fused attention through torch.nn.functional.scaled_dot_product_attention."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.cases import Case
from bench.peers.adapter import Call, Unsupported, no_gpu, top_left_causal, unmodified


class Cudnn:
    """torch SDPA restricted to its cuDNN backend."""

    name = "cudnn"

    def available(self) -> str | None:
        """Needs a GPU and a torch built with cuDNN."""
        if no_gpu() is None and not torch.backends.cudnn.is_available():
            return "this torch has no cuDNN"
        return no_gpu()

    def version(self) -> str:
        """cuDNN's version as torch reports it."""
        return f"cuDNN {torch.backends.cudnn.version()} through torch {torch.__version__}"

    def prepare(self, case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
        """SDPA over transposed views; the output comes back as (B, Sq, Hq, Dv) without a copy."""
        unmodified(case)
        if case.window is not None:
            raise Unsupported("torch's SDPA has no window")
        top_left_causal(case)
        return sdpa_call(SDPBackend.CUDNN_ATTENTION, case, (q, k, v))


def sdpa_call(backend: SDPBackend, case: Case, qkv: tuple[torch.Tensor, ...]) -> Call:
    """A call of SDPA that may use `backend` only; torch raises if that backend cannot serve it."""
    views = [t.transpose(1, 2) for t in qkv]
    grouped = case.heads_q != case.heads_kv

    def call() -> torch.Tensor:
        with sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(*views, is_causal=case.causal, enable_gqa=grouped)
        return out.transpose(1, 2)

    return call
