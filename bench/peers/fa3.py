"""FlashAttention 3: the Hopper kernels in C++, from the extension that vLLM ships, which has their varlen form only."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import torch

from bench.cases import Case
from bench.peers.adapter import Call, installed_version, no_gpu

UNUSED = (
    *("k_new", "v_new", "q_v", "out", "cu_seqlens_k_new", "seqused_q", "seqused_k", "page_table", "kv_batch_idx"),
    *("leftpad_k", "rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale"),
    *("scheduler_metadata", "pack_gqa", "s_aux", "cp_tot_seqused_k"),
)  # arguments without a default
EXTENSION = Path("vllm_flash_attn") / "_vllm_fa3_C.abi3.so"


class FlashAttention3:
    """`torch.ops._vllm_fa3_C.fwd` on sequences that lie end to end; vLLM itself is not imported."""

    name = "fa3"

    def available(self) -> str | None:
        """Needs a GPU and the extension's file in an installed vLLM."""
        return no_gpu() or (None if _extension() else f"no {EXTENSION} in an installed vllm")

    def version(self) -> str:
        """vLLM's version, of which the extension is a part."""
        return f"FlashAttention 3 of vllm {installed_version('vllm') or '(no version recorded)'}, varlen form"

    def prepare(self, case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
        """A document is a sequence of its own; its causal mask is bottom-right aligned, its splits by its own rule."""
        _load()
        sequences, documents = case.batch * case.documents, case.documents
        most = case.seq_q // documents, case.seq_k // documents
        ends_q, ends_k = (torch.arange(sequences + 1, dtype=torch.int32, device=q.device) * n for n in most)
        named = dict.fromkeys(UNUSED) | {
            "cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k, "max_seqlen_q": most[0], "max_seqlen_k": most[1],
            "softmax_scale": case.dim**-0.5, "is_causal": case.causal, "softcap": case.softcap or 0.0,
            "window_size_left": -1 if case.window is None else case.window - 1,
            "window_size_right": 0 if case.causal else -1, "is_rotary_interleaved": True,
            "num_splits": 0, "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0,
        }  # fmt: skip
        rows = [t.flatten(0, 1) for t in (q, k, v)]
        shape = (case.batch, case.seq_q, case.heads_q, case.dim_v)
        return lambda: torch.ops._vllm_fa3_C.fwd(*rows, **named)[0].view(shape)


def _extension() -> Path | None:
    """The extension's file."""
    found = importlib.util.find_spec("vllm")
    folders = [] if found is None else found.submodule_search_locations or []
    files = (Path(folder) / EXTENSION for folder in folders)
    return next((file for file in files if file.exists()), None)


@cache
def _load() -> None:
    torch.ops.load_library(str(_extension()))
