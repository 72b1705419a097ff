"""FlashInfer's attention calls: its wrappers with `plan` and `run`, single requests, and merging of states.

    import warpattn.integrations.flashinfer as flashinfer

    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(indptr, indices, last_page_len, 32, 8, 128, 16)       pages of each request, made into a table
    out = wrapper.run(q, kv_cache)                                     `attention_paged`

    layer.py     what all of them say of a layer: mask, score, scale; layouts; LSE in base 2, (rows, heads)
    pages.py     pages as FlashInfer lists them, as a `PagedKV`
    masks.py     masks of one's own in a batch
    single.py    one request        decode.py, prefill.py    batches        states.py    merging

Signatures are those of FlashInfer 0.7. What it may choose among kernels by is accepted and not used; what would change
the result is served, or one AttentionError.
"""

from warpattn.integrations.flashinfer.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
)
from warpattn.integrations.flashinfer.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
)
from warpattn.integrations.flashinfer.single import single_decode_with_kv_cache, single_prefill_with_kv_cache
from warpattn.integrations.flashinfer.states import merge_state, merge_state_in_place, merge_states

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
]
