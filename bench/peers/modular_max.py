"""Modular MAX's GPU flash attention, called from torch through MAX's graph operator."""

from __future__ import annotations

import torch

from bench.cases import Case
from bench.peers.adapter import Call, Unsupported, cannot_import, no_gpu, top_left_causal, unmodified, version_of


class ModularMax:
    """`max.nn.kernels.flash_attention_gpu` in a graph of its own; the output tensor is ours, allocated per call."""

    name = "max"

    def available(self) -> str | None:
        """Needs a GPU and the `max` package."""
        return no_gpu() or cannot_import("max.experimental.torch") or cannot_import("max.nn.kernels")

    def version(self) -> str:
        """MAX's version."""
        return version_of("max")

    def prepare(self, case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
        """Builds and compiles the graph on the first call."""
        from max.experimental.torch import graph_op
        from max.nn.attention import MHAMaskVariant
        from max.nn.kernels import flash_attention_gpu

        unmodified(case)
        if case.dim != case.dim_v:
            raise Unsupported("its operator takes one head dim for Q, K and V")
        top_left_causal(case)
        variant = MHAMaskVariant.CAUSAL_MASK if case.causal else MHAMaskVariant.NULL_MASK
        if case.window is not None:
            variant = MHAMaskVariant.SLIDING_WINDOW_CAUSAL_MASK
        window = -1 if case.window is None else case.window

        def attention(q, k, v):
            return flash_attention_gpu(q, k, v, variant, scale=case.dim**-0.5, local_window_size=window)

        operator = graph_op(attention, name="bench_" + case.name.replace("-", "_"))

        def call() -> torch.Tensor:
            out = torch.empty_like(q)
            operator(out, q, k, v)
            return out

        return call
