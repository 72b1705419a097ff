"""One case of every Hopper kernel, for compute-sanitizer on a card; not collected by pytest.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 python -m tests.gpu.sanitize

Tools: memcheck (no access outside of an allocation; without the caching allocator every tensor is one), synccheck,
and initcheck for what is read in kernels. racecheck does not follow mbarriers: it reports every slot of a ring, in
cuBLAS' kernels too; for races there is the simulator. Values are checked too, so that a tool which changed what runs is
noticed.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import cast

import torch

import warpattn as wa
from tests.cases import Case
from tests.gpu import test_mla as mla
from tests.oracle import check, poisoned
from tests.sim.sm90.mla import Latent, tensors

BASE = Case(dim=128, dtype=torch.bfloat16, heads_q=4, heads_kv=2, mask="causal")
PAGED = replace(BASE, kind="paged", batch=3, lens_k=(129, 0, 300), page_size=16)
CASES = {
    "prefill": replace(BASE, batch=1, seq_q=200, seq_k=200),
    "prefill, 64, score": replace(BASE, batch=1, dim=64, seq_q=130, seq_k=130, score="softcap"),
    "prefill, ragged": replace(BASE, kind="ragged", batch=4, lens_q=(1, 63, 0, 129)),
    "prefill, pages": replace(PAGED, seq_q=140),
    "prefill, odd pages": replace(PAGED, seq_q=140, page_size=3),
    "decode": replace(BASE, batch=2, seq_q=1, seq_k=1000, mask="full"),
    "decode, pages": replace(PAGED, seq_q=1),
    "decode, odd pages": replace(PAGED, seq_q=1, page_size=3),
    "decode, many rows": replace(PAGED, seq_q=16, heads_q=16, lens_k=(129, 64, 3000)),
    "decode, sinks": replace(PAGED, seq_q=2, sinks=True, dim=64),
}


def attend(name: str, case: Case) -> None:
    """Run one case and check its values."""
    x = case.build("cuda")
    shape = (*x.q.shape[:-1], case.dim_v or case.dim)
    tail = {"mask": x.mask, "score": x.score, "sinks": x.sinks, "scale": x.scale, "return_lse": True}
    tail |= {"out": poisoned(shape, x.q.dtype, x.q.device), "backend": "sm90"}
    if case.kind == "ragged":
        out, lse = wa.attention_varlen(x.q, x.k, x.v, cast("wa.Ragged", x.sequence), **tail)
    elif case.kind == "paged":
        out, lse = wa.attention_paged(x.q, cast("wa.PagedKV", x.sequence), **tail)
    else:
        out, lse = wa.attention(x.q, x.k, x.v, **tail)
    check(x, out, lse)
    print(f"{name}: right", flush=True)


def append() -> None:
    """New keys into pages, with rotary embedding, against the same on the CPU."""
    pages = [torch.zeros(6, 16, 2, 128, dtype=torch.bfloat16) for _ in range(2)]
    new = [torch.randn(2, 3, 2, 128).to(torch.bfloat16) for _ in range(2)]
    table, lengths = torch.tensor([[4, 1], [0, 2]], dtype=torch.int32), torch.tensor([18, 3], dtype=torch.int32)
    cos, sin = torch.randn(40, 32), torch.randn(40, 32)
    there = [x.cuda() for x in (*pages, table, lengths, *new, cos, sin)]
    wa.append_paged(pages[0], pages[1], table, lengths, new[0], new[1], cos=cos, sin=sin)
    k, v, card_table, card_lengths, k_new, v_new, card_cos, card_sin = there
    wa.append_paged(k, v, card_table, card_lengths, k_new, v_new, cos=card_cos, sin=card_sin)
    for here, card in zip(pages, there[:2], strict=True):
        torch.testing.assert_close(card.cpu(), here, atol=2e-2, rtol=1e-2)
    print("append: right", flush=True)


def latent() -> None:
    """Latent attention through pages, dense, and through pages whose rows are gathered."""
    for page, lengths in ((16, (129, 0, 700)), (0, (700,)), (3, (70, 1))):
        case = Latent(lengths, page=page, heads=32)
        x = tensors(case, device="cuda")
        mla.check(mla.call(x, case), x, case)
        print(f"latent, pages of {page}: right", flush=True)


def settled() -> None:
    """A planned step on a settled cache right behind `append_paged`, deep rings and whole heads, and dense."""
    for page, dim in ((16, 128), (64, 64), (16, 256), (0, 128)):
        case = replace(PAGED, page_size=page or 16, dim=dim, seq_q=1, lens_k=(129, 64, 3000), heads_q=8)
        x = (case if page else replace(BASE, dim=dim, batch=2, seq_q=1, seq_k=3000, mask="full")).build("cuda")
        kv = cast("wa.PagedKV", x.sequence) if page else (x.k, x.v)
        plan = wa.DecodePlan(x.q, kv, mask=x.mask, scale=x.scale, return_lse=True, cache_settled=True)
        if isinstance(kv, wa.PagedKV):
            new = [torch.randn(len(x.q), 1, 2, dim, device="cuda").to(x.q.dtype) for _ in range(2)]
            wa.append_paged(kv.k_pages, kv.v_pages, kv.block_table, kv.lengths, *new)
        check(x, *plan(x.q, kv))
        print(f"settled, pages of {page}, head dim {dim}: right", flush=True)


def main(only: list[str]) -> None:
    """Run the cases whose names contain one of the words, or all."""
    torch.manual_seed(0)
    for name, case in CASES.items():
        if not only or any(word in name for word in only):
            attend(name, case)
    for function in (append, latent, settled):
        if not only or function.__name__ in only:
            function()


if __name__ == "__main__":
    main(sys.argv[1:])
