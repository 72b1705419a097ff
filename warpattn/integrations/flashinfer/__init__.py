"""FlashInfer's attention calls: its wrappers with `plan` and `run`, single requests, and merging of states.

    import warpattn.integrations.flashinfer as flashinfer

    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(indptr, indices, last_page_len, 32, 8, 128, 16)       pages of each request, made into a table
    out = wrapper.run(q, kv_cache)                                     `attention_paged`

    layer.py     a layer's mask, score, scale; layouts; LSE in base 2, (rows, heads)
    tables.py    turns FlashInfer's lists of pages into a `PagedKV`
    masks.py     custom masks of a batch, as bools or bits
    older.py     `forward`, and calls that do nothing here: workspaces, warming
    single.py    one request        decode.py, prefill.py    batches        mla.py    latent attention
    states.py    merging            cascade.py    keys that requests share        page.py    new keys and values

Signatures are those of FlashInfer 0.7. Arguments by which it chooses kernels are accepted and not used; those that
would change the result are served or raise one AttentionError.
"""

from warpattn.integrations.flashinfer.cascade import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper,
    merge_state,
    merge_state_in_place,
    merge_states,
)
from warpattn.integrations.flashinfer.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    single_decode_with_kv_cache,
)
from warpattn.integrations.flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata
from warpattn.integrations.flashinfer.page import (
    append_paged_kv_cache,
    append_paged_mla_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
)
from warpattn.integrations.flashinfer.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from warpattn.integrations.flashinfer.quantization import packbits, segment_packbits

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "MLAPlanMetadata",
    "MultiLevelCascadeAttentionWrapper",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "packbits",
    "segment_packbits",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]
