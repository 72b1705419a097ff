"""warpattn as an out-of-tree attention backend of vLLM (interface of vLLM 0.33).

    vllm serve MODEL --attention-backend CUSTOM

`vllm_plugin` puts `WarpattnBackend` behind the name CUSTOM in each of vLLM's processes. A step of the engine is a batch
of requests, their new tokens laid end to end:

    requests     0    1    2    3         4
    new tokens   1    1    1    300       128
    context    812   77  501      0      1024
               └─ one paged ─┘  varlen   paged     ◄─ `Run`s, found once a step from what is on the host, used by layers

Neighbours with equally many new tokens are one call of `attention_paged`; neighbours without context (fresh prompts)
are one call of `attention_varlen` on the keys at hand. Nothing is read back from the GPU. Keys and values are written
into the cache by `do_kv_cache_update`, which vLLM calls before `forward`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from warpattn.api import attention_paged, attention_varlen
from warpattn.errors import AttentionError
from warpattn.masks import Causal, Full, Mask, SlidingWindow
from warpattn.scores import ALiBi, Score, SoftCap
from warpattn.sequences import PagedKV, Ragged

__all__ = ["WarpattnBackend", "WarpattnImpl", "WarpattnMetadata", "WarpattnMetadataBuilder"]

CACHE_DTYPES = ["auto", "float16", "bfloat16"]
# What `attention` has kernels for, by capability as vLLM reports it, and their largest head dim.
CUDA = {(9, 0): 256, (10, 0): 128}
ROCM = {(9, 4): 256, (9, 5): 256}  # gfx942, gfx950; (9, 0) is gfx90a there
ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


class WarpattnBackend(AttentionBackend):
    """What vLLM asks about the backend before it makes one."""

    supported_dtypes = [torch.float16, torch.bfloat16]  # noqa: RUF012 - the base class declares it so
    supported_kv_cache_dtypes = CACHE_DTYPES
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM looks its enumeration up by this name

    @staticmethod
    def get_impl_cls() -> type[WarpattnImpl]:
        return WarpattnImpl

    @staticmethod
    def get_builder_cls() -> type[WarpattnMetadataBuilder]:
        return WarpattnMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= 256

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # runs are found from the lengths on the host

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, *ENCODERS)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return _largest_head(capability) is not None

    @classmethod
    def supports_combination(cls, head_size: int, *others: Any) -> str | None:
        """Why a head dim will not do on a card; vLLM asks with nine arguments, the card's capability last."""
        largest = _largest_head(others[-1])
        if largest is None or head_size <= largest:
            return None
        return f"head_size above {largest} on this card"


def _largest_head(capability: Any) -> int | None:
    return (ROCM if torch.version.hip else CUDA).get((capability.major, capability.minor))


class Run(NamedTuple):
    """Neighbouring requests that one call serves."""

    requests: slice
    tokens: slice
    length: int  # new tokens of each request; of the longest one in a fresh run
    offsets: Tensor | None = None  # fresh run: where its requests start, int32 [requests + 1], from 0
    parts: tuple[Run, ...] = ()  # fresh run: the same as runs of equal lengths, for layers that must read the cache


@dataclass
class WarpattnMetadata(AttentionMetadata):
    """One step of the engine, the same for all layers of a group."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor  # int32 [requests + 1]
    seq_lens: Tensor  # int32 [requests], context and new tokens
    block_table: Tensor  # int32 [requests, pages]
    slot_mapping: Tensor  # int64 [tokens]
    runs: tuple[Run, ...]


class WarpattnMetadataBuilder(AttentionMetadataBuilder[WarpattnMetadata]):
    """Makes a step's metadata from vLLM's."""

    _cudagraph_support = AttentionCGSupport.NEVER  # vLLM captures what lies between attention, not attention
    reorder_batch_threshold = 1  # single-token requests come first, so that they are one run

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> WarpattnMetadata:
        """A shared prefix is not used: every request reads its own pages."""
        common = common_attn_metadata
        if isinstance(common.causal, Tensor):
            raise AttentionError(
                "causal is a tensor; warpattn's vLLM backend takes batches that are all causal or none"
            )
        return WarpattnMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            runs=find_runs(common),
        )


def find_runs(common: Any) -> tuple[Run, ...]:
    """The runs of a batch, from the host's copies of its offsets and of upper bounds of its lengths."""
    starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
    bounds = getattr(common, "seq_lens_cpu_upper_bound", None)
    longest = [None] * common.num_reqs if bounds is None else bounds[: common.num_reqs].tolist()
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    fresh = [length > 0 and bound == length for length, bound in zip(lengths, longest, strict=True)]
    runs: list[Run] = []
    for is_fresh, group in itertools.groupby(range(common.num_reqs), key=lambda r: fresh[r]):
        requests = list(group)
        equal = _equal_runs(requests, lengths, starts)
        if not is_fresh:
            runs += equal
            continue
        rows = slice(requests[0], requests[-1] + 1)
        offsets = common.query_start_loc[rows.start : rows.stop + 1] - starts[rows.start]
        tokens = slice(starts[rows.start], starts[rows.stop])
        runs.append(Run(rows, tokens, max(lengths[r] for r in requests), offsets, tuple(equal)))
    return tuple(runs)


def _equal_runs(requests: list[int], lengths: list[int], starts: list[int]) -> list[Run]:
    """Runs of equally many new tokens; requests without any (padding of a batch) need no run."""
    runs = []
    for length, group in itertools.groupby(requests, key=lambda r: lengths[r]):
        rows = list(group)
        if length:
            requests_of_run = slice(rows[0], rows[-1] + 1)
            runs.append(Run(requests_of_run, slice(starts[rows[0]], starts[rows[-1] + 1]), length))
    return runs


def key_and_value_pages(kv_cache: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """Views (pages, page size, heads, head_dim) of vLLM's cache (pages, heads, page size, keys and values)."""
    keys, values = kv_cache.transpose(1, 2).split(head_size, dim=-1)
    return keys, values


class LayerOptions(NamedTuple):
    """What vLLM says of a layer, in its order of arguments."""

    num_heads: int
    head_size: int
    scale: float
    num_kv_heads: int | None = None
    alibi_slopes: list[float] | None = None
    sliding_window: int | None = None
    kv_cache_dtype: str = "auto"
    logits_soft_cap: float | None = None
    attn_type: str = AttentionType.DECODER
    kv_sharing_target_layer_name: str | None = None
    sinks: Tensor | None = None


class WarpattnImpl(AttentionImpl[WarpattnMetadata]):
    """One layer's attention."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        unknown = set(named) - set(LayerOptions._fields)
        if unknown:
            rule = "warpattn's vLLM backend would ignore it"
            raise AttentionError(*(f"{name} is an option of this model; {rule}" for name in sorted(unknown)))
        options = LayerOptions(*arguments, **named)
        if options.kv_cache_dtype not in CACHE_DTYPES:
            listed = ", ".join(CACHE_DTYPES)
            raise AttentionError(f"kv_cache_dtype is {options.kv_cache_dtype!r}; it must be one of {listed}")
        if not WarpattnBackend.supports_attn_type(options.attn_type):
            raise AttentionError(
                f"attn_type is {options.attn_type!r}; warpattn's vLLM backend has decoders and encoders"
            )
        self.options = options
        self.num_heads, self.head_size, self.scale = options.num_heads, options.head_size, float(options.scale)
        self.num_kv_heads = options.num_heads if options.num_kv_heads is None else options.num_kv_heads
        self.kv_cache_dtype = options.kv_cache_dtype
        self.mask = _layer_mask(options)
        self._score: tuple[torch.device, Score | None] | None = None

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write new keys and values [tokens, heads, head_dim] into their slots; slot -1 is padding.

        Padding rewrites slot 0 with what it holds: it lies in page 0, which vLLM gives to no request.
        """
        size, count = kv_cache.shape[2], len(slot_mapping)
        cache = key_and_value_pages(kv_cache, self.head_size)
        real = (slot_mapping >= 0)[:, None, None]
        slots = slot_mapping.clamp_min(0)
        place = slots // size, slots % size
        for pages, new in zip(cache, (key, value), strict=True):
            pages[place] = torch.where(real, new[:count].to(pages.dtype), pages[place])

    def forward(
        self,
        layer: Any,
        query: Tensor,  # [tokens, heads, head_dim], and maybe rows of padding after them
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: WarpattnMetadata | None,
        output: Tensor,
        **scales: Any,
    ) -> Tensor:
        """Write the attention of every token into `output` and return it."""
        given = [name for name, scale in scales.items() if scale is not None]
        if given:
            raise AttentionError(
                f"{given[0]} is given; warpattn's vLLM backend writes outputs in the dtype of the queries"
            )
        if attn_metadata is None:  # vLLM measures memory
            return output.fill_(0)
        out = output.view(len(output), self.num_heads, self.head_size)
        if self.options.attn_type in ENCODERS:
            tokens = slice(0, attn_metadata.num_actual_tokens)
            whole = Run(slice(0, None), tokens, attn_metadata.max_query_len, attn_metadata.query_start_loc)
            self._fresh(whole, (query, key, value), out)
            return output
        shared = self.options.kv_sharing_target_layer_name is not None  # keys lie in another layer's cache
        for run in attn_metadata.runs:
            if run.offsets is not None and not shared:
                self._fresh(run, (query, key, value), out)
            else:
                for part in run.parts or (run,):
                    self._paged(part, query, kv_cache, attn_metadata, out)
        return output

    def _fresh(self, run: Run, qkv: tuple[Tensor, Tensor, Tensor], out: Tensor) -> None:
        """Requests whose keys are all at hand."""
        assert run.offsets is not None
        q, k, v = (x[run.tokens] for x in qkv)
        sequences = Ragged(run.offsets, max_q=run.length, max_k=run.length)
        attention_varlen(q, k, v, sequences, out=out[run.tokens], **self._modifiers(q))

    def _paged(self, run: Run, query: Tensor, kv_cache: Tensor, step: WarpattnMetadata, out: Tensor) -> None:
        """Equally many new tokens of each request, against its pages."""
        shape = (run.requests.stop - run.requests.start, run.length)
        q, result = (x[run.tokens].unflatten(0, shape) for x in (query, out))
        k_pages, v_pages = key_and_value_pages(kv_cache, self.head_size)
        pages = PagedKV(k_pages, v_pages, step.block_table[run.requests], step.seq_lens[run.requests])
        attention_paged(q, pages, out=result, **self._modifiers(q))

    def _modifiers(self, q: Tensor) -> dict[str, Any]:
        if self._score is None or self._score[0] != q.device:  # slopes come as a list, and layers may move
            self._score = q.device, _layer_score(self.options, q.device)
        return {"mask": self.mask, "score": self._score[1], "sinks": self.options.sinks, "scale": self.scale}


def _layer_mask(options: LayerOptions) -> Mask:
    window = options.sliding_window
    if options.attn_type in ENCODERS:
        return Full() if window is None else SlidingWindow(window, right=window - 1)
    return Causal() if window is None else SlidingWindow(window)


def _layer_score(options: LayerOptions, device: torch.device) -> Score | None:
    """Soft-cap first, then ALiBi."""
    cap, slopes = options.logits_soft_cap, options.alibi_slopes
    score = SoftCap(cap) if cap else None
    if slopes is None:
        return score
    alibi = ALiBi(torch.tensor(slopes, dtype=torch.float32, device=device))
    return alibi if score is None else score | alibi
