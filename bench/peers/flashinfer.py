"""FlashInfer's batch prefill over ragged K and V, which is its path for dense prefill."""

from __future__ import annotations

import torch

from bench.cases import Case
from bench.peers.adapter import Call, cannot_import, no_gpu, unmodified, version_of

WORKSPACE = 256 << 20  # bytes; its documentation asks for 128 MiB


class FlashInfer:
    """`BatchPrefillWithRaggedKVCacheWrapper`, backend "auto"; builds its kernels with nvcc on the first call."""

    name = "flashinfer"

    def available(self) -> str | None:
        """Needs a GPU and the package."""
        return no_gpu() or cannot_import("flashinfer")

    def version(self) -> str:
        """FlashInfer's version."""
        return version_of("flashinfer-python")

    def prepare(self, case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
        """Plans once; the call reads (tokens, heads, dim) views of the inputs."""
        import flashinfer

        unmodified(case, softcap=True)

        def offsets(length: int) -> torch.Tensor:
            return torch.arange(case.batch + 1, dtype=torch.int32, device=q.device) * length

        workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=q.device)
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(
            offsets(case.seq_q),
            offsets(case.seq_k),
            case.heads_q,
            case.heads_kv,
            case.dim,
            head_dim_vo=case.dim_v,
            causal=case.causal,
            logits_soft_cap=case.softcap or 0.0,
            window_left=-1 if case.window is None else case.window - 1,
            q_data_type=q.dtype,
            kv_data_type=k.dtype,
        )
        tokens = [t.flatten(0, 1) for t in (q, k, v)]
        return lambda: wrapper.run(*tokens).view(case.batch, case.seq_q, case.heads_q, case.dim_v)
