"""warpattn itself, through its public call, so that what users get is what is timed."""

from __future__ import annotations

import torch

from bench.cases import Case
from bench.peers.adapter import Call, cannot_import, version_of


class Warpattn:
    """`warpattn.attention` with backend="auto": the kernel on a GPU, the reference on a CPU."""

    name = "warpattn"

    def available(self) -> str | None:
        """None unless the package does not import."""
        return cannot_import("warpattn")

    def version(self) -> str:
        """warpattn's and Triton's versions."""
        import warpattn

        return f"warpattn {getattr(warpattn, '__version__', '(no version)')}, {version_of('triton')}"

    def prepare(self, case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
        """One call of the public API."""
        import warpattn as wa

        mask, score = None, None if case.softcap is None else wa.SoftCap(case.softcap)
        if case.window is not None:
            mask = wa.SlidingWindow(case.window)
        elif case.causal:
            mask = wa.Causal()
        if case.documents > 1:
            ids = (torch.arange(case.seq_q, device=q.device) // (case.seq_q // case.documents)).expand(case.batch, -1)
            mask = wa.Document(ids, runs=True) if mask is None else mask & wa.Document(ids, runs=True)
        return lambda: wa.attention(q, k, v, mask=mask, score=score)
