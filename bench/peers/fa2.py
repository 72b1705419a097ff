"""FlashAttention 2 as it comes with torch (its SDPA flash backend, and the operator below it for windows)."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend

from bench.cases import Case
from bench.peers.adapter import Call, no_gpu, unmodified
from bench.peers.cudnn import sdpa_call


class FlashAttention2:
    """torch's built-in FlashAttention 2."""

    name = "fa2"

    def available(self) -> str | None:
        """Needs a GPU and a torch built with flash attention."""
        if no_gpu() is None and not torch.backends.cuda.is_flash_attention_available():
            return "this torch was built without flash attention"
        return no_gpu()

    def version(self) -> str:
        """torch's version; it carries its own copy of FlashAttention 2."""
        return f"FlashAttention 2 of torch {torch.__version__}"

    def prepare(self, case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
        """SDPA where it can express the case, else the operator, whose causal mask is bottom-right aligned."""
        unmodified(case)
        if case.window is None and not (case.causal and case.seq_q != case.seq_k):
            return sdpa_call(SDPBackend.FLASH_ATTENTION, case, (q, k, v))
        window = {} if case.window is None else {"window_size_left": case.window - 1, "window_size_right": 0}

        def call() -> torch.Tensor:
            lengths = (case.seq_q, case.seq_k)
            return torch.ops.aten._flash_attention_forward(
                q, k, v, None, None, *lengths, 0.0, case.causal, False, **window
            )[0]

        return call
