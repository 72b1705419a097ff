"""flash-attn-4: the CuTe DSL kernels of FlashAttention (on Hopper: flash_fwd_sm90)."""

from __future__ import annotations

import torch

from bench.cases import Case
from bench.peers.adapter import Call, cannot_import, no_gpu, unmodified, version_of


class FlashAttention4:
    """`flash_attn.cute.interface.flash_attn_func`; compiles each variant on its first call."""

    name = "fa4"

    def available(self) -> str | None:
        """Needs a GPU, flash-attn-4 and the CuTe DSL with its libraries."""
        return no_gpu() or cannot_import("flash_attn.cute.interface")

    def version(self) -> str:
        """flash-attn-4's and the CuTe DSL's versions."""
        return version_of("flash-attn-4", "nvidia-cutlass-dsl")

    def prepare(self, case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
        """Its causal mask is bottom-right aligned and its window counts keys beside the row's own."""
        from flash_attn.cute.interface import flash_attn_func

        unmodified(case, softcap=True)
        windowed = case.window is not None
        window = (case.window - 1, 0) if case.window is not None else (None, None)
        causal = case.causal and not windowed
        return lambda: flash_attn_func(q, k, v, causal=causal, window_size=window, softcap=case.softcap or 0.0)[0]
