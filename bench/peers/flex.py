"""torch's FlexAttention, compiled by Inductor, with a block mask made once per case."""

from __future__ import annotations

import torch

from bench.cases import Case
from bench.peers.adapter import Call, cannot_import, no_gpu, unmodified, version_of


class FlexAttention:
    """`torch.compile(flex_attention)`; it breaks where torch and Triton do not fit, which preparing it reports."""

    name = "flex"

    def available(self) -> str | None:
        """Needs a GPU and importable FlexAttention; whether Inductor can use this Triton shows in `prepare`."""
        return no_gpu() or cannot_import("torch.nn.attention.flex_attention")

    def version(self) -> str:
        """torch's and Triton's versions."""
        return version_of("torch", "triton")

    def prepare(self, case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
        """Compiles on the first call; the block mask skips what is hidden."""
        import torch._dynamo
        import torch._inductor.config
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        unmodified(case)
        offset = case.seq_k - case.seq_q

        def keep(b, h, row, key):
            position = row + offset
            visible = key <= position
            return visible if case.window is None else visible & (position - key < case.window)

        blocks = create_block_mask(keep, None, None, case.seq_q, case.seq_k, device=q.device) if case.causal else None
        views = [t.transpose(1, 2) for t in (q, k, v)]
        # Dynamo keeps at most 8 variants of one function: forget those of earlier cases. Inductor's pool of compile
        # processes does not pay for one kernel, and would hang on a Triton it cannot load.
        torch._dynamo.reset()
        torch._inductor.config.compile_threads = 1
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        grouped = case.heads_q != case.heads_kv
        return lambda: compiled(*views, block_mask=blocks, enable_gqa=grouped).transpose(1, 2)
