"""FlashInfer's calls on a card, by FlashInfer itself and by ours, on the same tensors.

FlashInfer compiles its kernels when they are first called; several workers of pytest-xdist compile side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from warpattn.integrations import flashinfer as ours

pytestmark = pytest.mark.gpu
itself = pytest.importorskip("flashinfer")

DEVICE = "cuda"
HQ, HKV, D, PAGE = 8, 2, 128, 16
LENGTHS = (5, 300, 16, 1000)  # of each request's keys
QUERIES = (1, 40, 16, 130)  # of each request, where it has several
MLA = (16, 512, 64)  # heads, latent and rotary columns
TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 2e-3, torch.uint8: 0, torch.int32: 0}
Results = tuple[Tensor, ...]


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def ints(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32).to(DEVICE)


def offsets(counts: tuple[int, ...]) -> Tensor:
    return ints([sum(counts[:i]) for i in range(len(counts) + 1)])


def workspace() -> Tensor:
    return torch.zeros(128 << 20, dtype=torch.uint8, device=DEVICE)


class Pages:
    """Pages of all requests in random order: their lists, and a cache of 16 or 8 bits, rows before heads."""

    def __init__(self, columns: int = D, dtype: torch.dtype = torch.bfloat16) -> None:
        counts = tuple(-(-length // PAGE) for length in LENGTHS)
        self.indptr, self.indices = offsets(counts), torch.randperm(sum(counts)).int().to(DEVICE)
        self.last = ints([(length - 1) % PAGE + 1 for length in LENGTHS])
        self.cache = normal(sum(counts), 2, PAGE, HKV, columns).to(dtype)

    @property
    def heads_first(self) -> Tensor:
        return self.cache.transpose(2, 3).contiguous()


def single_decode(lib: Any, **given: Any) -> Results:
    return (lib.single_decode_with_kv_cache(normal(HQ, D), normal(777, HKV, D), normal(777, HKV, D), **given),)


def single_prefill(lib: Any, dtype: torch.dtype = torch.bfloat16, **given: Any) -> Results:
    q, k, v = (normal(n, h, D, dtype=dtype) for n, h in ((200, HQ), (333, HKV), (333, HKV)))
    return lib.single_prefill_with_kv_cache(q, k, v, return_lse=True, **given)


def single_mask(lib: Any) -> Results:
    mask = torch.rand(200, 333, device=DEVICE) < 0.5
    mask[7] = torch.arange(333, device=DEVICE) == 3
    return single_prefill(lib, custom_mask=mask)


def decode(lib: Any, layout: str = "NHD", dtype: torch.dtype = torch.bfloat16, plan: Any = (), **given: Any) -> Results:
    pages = Pages(dtype=dtype)
    wrapper = lib.BatchDecodeWithPagedKVCacheWrapper(workspace(), layout)
    options = {"q_data_type": torch.bfloat16, "kv_data_type": dtype, **dict(plan)}
    wrapper.plan(pages.indptr, pages.indices, pages.last, HQ, HKV, D, PAGE, **options)
    cache = pages.cache if layout == "NHD" else pages.heads_first
    return wrapper.run(normal(len(LENGTHS), HQ, D), cache, return_lse=True, **given)


def prefill(lib: Any, masked: bool = False, **given: Any) -> Results:
    pages = Pages()
    wrapper = lib.BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD")
    if masked:
        masks = [torch.rand(sizes, device=DEVICE) < 0.7 for sizes in zip(QUERIES, LENGTHS, strict=True)]
        for mask in masks:
            mask[:, 0] = True  # each query sees a key
        given["custom_mask"] = torch.cat([mask.flatten() for mask in masks])
    wrapper.plan(
        offsets(QUERIES), pages.indptr, pages.indices, pages.last, HQ, HKV, D, PAGE,
        q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16, **given,
    )  # fmt: skip
    return wrapper.run(normal(sum(QUERIES), HQ, D), pages.cache, return_lse=True)


def ragged(lib: Any, dims: tuple[int, int] = (D, D), **given: Any) -> Results:
    q, k = normal(sum(QUERIES), HQ, dims[0]), normal(sum(LENGTHS), HKV, dims[0])
    wrapper = lib.BatchPrefillWithRaggedKVCacheWrapper(workspace(), "NHD")
    wrapper.plan(
        offsets(QUERIES), offsets(LENGTHS), HQ, HKV, dims[0], head_dim_vo=dims[1], q_data_type=torch.bfloat16, **given
    )
    return wrapper.run(q, k, normal(sum(LENGTHS), HKV, dims[1]), return_lse=True)


def latent(lib: Any, queries: tuple[int, ...] = (1, 1, 1, 1), causal: bool = False) -> Results:
    heads, columns, rope = MLA
    pages = Pages()
    cache = normal(len(pages.indices), PAGE, columns + rope)
    wrapper = lib.BatchMLAPagedAttentionWrapper(workspace(), backend="fa2")
    wrapper.plan(
        qo_indptr=offsets(queries), kv_indptr=pages.indptr, kv_indices=pages.indices, kv_len_arr=ints(LENGTHS),
        num_heads=heads, head_dim_ckv=columns, head_dim_kpe=rope, page_size=PAGE, causal=causal, sm_scale=192**-0.5,
        q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    q = [normal(sum(queries), heads, n) for n in (columns, rope)]
    parts = [part.contiguous() for part in cache.split([columns, rope], dim=-1)]
    return wrapper.run(q_nope=q[0], q_pe=q[1], ckv_cache=parts[0], kpe_cache=parts[1], return_lse=True)


def cascade(lib: Any) -> Results:
    """Two levels: all requests share 320 keys, and each has its own."""
    own = Pages()
    shared = 320 // PAGE
    cache = torch.cat([own.cache, normal(shared, 2, PAGE, HKV, D)])
    first = len(own.indices)
    wrapper = lib.MultiLevelCascadeAttentionWrapper(2, workspace(), "NHD")
    wrapper.plan(
        [ints([0, sum(QUERIES)]), offsets(QUERIES)],
        [ints([0, shared]), own.indptr],
        [ints(range(first, first + shared)), own.indices],
        [ints([PAGE]), own.last],
        HQ, HKV, D, PAGE, causal=True, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    return (wrapper.run(normal(sum(QUERIES), HQ, D), cache),)


def merges(lib: Any) -> Results:
    """Results over parts of the keys; a row of one part saw none."""
    states = [(normal(50, HQ, D), torch.randn(50, HQ, device=DEVICE) * 9) for _ in range(2)]
    states[1][1][3] = -float("inf")
    (a, lse_a), (b, lse_b) = states
    several = normal(50, 5, HQ, D), torch.randn(50, 5, HQ, device=DEVICE)
    found = (*lib.merge_state(a, lse_a, b, lse_b), *lib.merge_states(*several))
    lib.merge_state_in_place(a, lse_a, b, lse_b)
    return (*found, a, lse_a)


def bits(lib: Any) -> Results:
    mask = torch.rand(1000, device=DEVICE) < 0.5
    packed, starts = lib.segment_packbits(mask, offsets((13, 400, 0, 587)), bitorder="little")
    return lib.packbits(mask, bitorder="little"), lib.packbits(mask, bitorder="big"), packed, starts.int()


CALLS: dict[str, Callable[[Any], Results]] = {
    "single decode": single_decode,
    "single decode, soft cap, window": lambda lib: single_decode(lib, logits_soft_cap=5.0, window_left=100),
    "single prefill": single_prefill,
    "single prefill, causal, fp16": lambda lib: single_prefill(lib, torch.float16, causal=True),
    "single prefill, window, soft cap": lambda lib: single_prefill(
        lib, causal=True, window_left=50, logits_soft_cap=5.0
    ),
    "single prefill, mask": single_mask,
    "decode": decode,
    "decode, heads before rows": lambda lib: decode(lib, "HND"),
    "decode, tensor cores' groups, window": lambda lib: decode(lib, plan={"window_left": 64}),
    "decode, soft cap, scale": lambda lib: decode(lib, plan={"logits_soft_cap": 5.0, "sm_scale": 0.2}),
    "decode, 8 bits": lambda lib: decode(lib, dtype=torch.float8_e4m3fn, k_scale=0.5, v_scale=2.0),
    "prefill": prefill,
    "prefill, causal": lambda lib: prefill(lib, causal=True),
    "prefill, causal, window": lambda lib: prefill(lib, causal=True, window_left=30),
    "prefill, soft cap": lambda lib: prefill(lib, causal=True, logits_soft_cap=5.0),
    "prefill, mask": lambda lib: prefill(lib, masked=True),
    "ragged": lambda lib: ragged(lib, causal=True),
    "ragged, window": lambda lib: ragged(lib, causal=True, window_left=30),
    "ragged, 192/128": lambda lib: ragged(lib, (192, 128), causal=True),
    "latent": latent,
    "latent, several tokens": lambda lib: latent(lib, (1, 4, 2, 3), causal=True),
    "cascade": cascade,
    "merges": merges,
    "bits": bits,
}


@pytest.fixture(autouse=True)
def fa2(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer's kernels for Hopper take minutes to compile; those that it has for every card compute the same."""
    monkeypatch.setattr("flashinfer.prefill.determine_attention_backend", lambda *args, **options: "fa2")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # calls as 0.7.0 takes them, too
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_same_results_as_flashinfer(call: Callable[[Any], Results]) -> None:
    results = []
    for lib in (itself, ours):
        torch.manual_seed(0)
        results.append(call(lib))
    theirs, here = results
    assert len(theirs) == len(here)
    for expected, found in zip(theirs, here, strict=True):
        assert found.shape == expected.shape and found.dtype == expected.dtype
        most = TOLERANCE[expected.dtype] * max(1.0, float(expected.float().nan_to_num(neginf=0.0).abs().max()))
        torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=most)
