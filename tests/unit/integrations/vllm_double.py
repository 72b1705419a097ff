"""A stand-in for the parts of vLLM that the backend touches, since an engine cannot be installed for the tests.

It states the facts that `warpattn.integrations.vllm` relies on, as read from the source of vLLM 0.33:

    vllm.v1.attention.backend             which methods are abstract, what a metadata builder is constructed with, the
                                          fields of a batch, the questions that validate_configuration asks;
                                          the cache of a layer: (pages, heads, page size, 2 * head_dim), any strides
    vllm.v1.attention.backends.registry   CUSTOM is a member without a class until register_backend names one; new names
                                          become members where `takes_names`, as in 0.32 and not in 0.26
    …layers.attention.mla_attention       what its classes for latent attention keep
"""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
envs = SimpleNamespace(VLLM_BATCH_INVARIANT=False)


class AttentionType(str, Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionCGSupport(Enum):
    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


@dataclass
class MultipleOf:
    base: int


class AttentionMetadata:
    pass


@dataclass
class CommonAttentionMetadata:
    """A batch as the engine describes it."""

    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Tensor
    slot_mapping: Tensor
    causal: Any = True
    seq_lens_cpu_upper_bound: Tensor | None = None
    mm_req_doc_ranges: dict[int, list[tuple[int, int]]] | None = None  # first and last position of each image


class AttentionBackend(ABC):
    """Static questions; `supports_*` are combined by `validate_configuration`."""

    @staticmethod
    @abstractmethod
    def get_name() -> str: ...

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type: ...

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type: ...

    @classmethod
    def supports_sink(cls) -> bool:
        return False


class AttentionMetadataBuilder(ABC, Generic[T]):
    @abstractmethod
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        self.device = device

    @abstractmethod
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> T: ...


class AttentionImpl(ABC, Generic[T]):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(cls)

    @abstractmethod
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Tensor: ...


class QueryLenSupport(Enum):
    UNIFORM = "uniform"


class MLACommonMetadata(AttentionMetadata):
    pass


class MLACommonBackend(AttentionBackend):
    pass


class MLACommonMetadataBuilder(Generic[T]):
    def __init__(self, prefill_backend: Any) -> None:
        self._prefill_backend = prefill_backend

    def build(self, **fields: Any) -> MLACommonMetadata:
        metadata = MLACommonMetadata()
        vars(metadata).update(fields)
        return metadata


class MLACommonImpl(Generic[T]):
    dcp_world_size = 1

    def __init__(self, scale: float, kv_lora_rank: int, **named: Any) -> None:
        self.scale, self.kv_lora_rank = scale, kv_lora_rank


class MLAPrefillBackend:
    def __init__(self, **named: Any) -> None:
        vars(self).update(named)

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        self._prefill_metadata = prefill_metadata


class AttentionBackendEnum(Enum):
    FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
    CUSTOM = None

    def is_overridden(self) -> bool:
        return self in PATHS

    def get_class(self) -> type:
        module, _, name = PATHS[self].rpartition(".")
        return getattr(importlib.import_module(module), name)


PATHS: dict[AttentionBackendEnum | str, str] = {}
takes_names = [True]


def register_backend(backend: AttentionBackendEnum | str, class_path: str) -> None:
    if isinstance(backend, str) and takes_names[0]:
        member = object.__new__(AttentionBackendEnum)
        member._name_, member._value_ = backend, class_path
        AttentionBackendEnum._member_map_[backend] = member
        backend = member
    PATHS[backend] = class_path


def install(monkeypatch: Any) -> None:
    """Make `import vllm...` find this file's classes."""
    names = ["vllm", "vllm.envs", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backend"]
    names += ["vllm.v1.attention.backends", "vllm.v1.attention.backends.registry"]
    for name in ("vllm.model_executor.layers.attention.mla_attention", "vllm.v1.attention.backends.mla.prefill.base"):
        parts = name.split(".")
        names += [".".join(parts[: count + 1]) for count in range(len(parts)) if parts[:count]]
    for name in names:
        module = ModuleType(name)
        vars(module).update({key: value for key, value in globals().items() if not key.startswith("__")})
        monkeypatch.setitem(sys.modules, name, module)
    for name in [name for name in sys.modules if name.startswith("warpattn.integrations.vllm")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("WARPATTN", "WARPATTN_MLA"):
        AttentionBackendEnum._member_map_.pop(name, None)
    takes_names[0] = True
    PATHS.clear()


class Engine:
    """A cache of pages and the bookkeeping of requests, for one layer: what an engine does around attention."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype = torch.float32, pages: int = 64) -> None:
        self.heads_q, self.heads_kv, self.dim = shape
        self.size, self.dtype = 16, dtype
        physical = torch.zeros(pages, self.size, self.heads_kv, 2 * self.dim, dtype=dtype)
        self.cache = physical.transpose(1, 2)
        self.free = torch.randperm(pages - 1).add(1).tolist()  # page 0 is of no request
        self.tables: dict[str, list[int]] = {}
        self.history: dict[str, tuple[Tensor, Tensor]] = {}

    def step(
        self, new: dict[str, int], known_lengths: bool = True, **batch_fields: Any
    ) -> tuple[CommonAttentionMetadata, Tensor, Any, Any]:
        """(batch, queries, keys, values) of `new` tokens per request; the history keeps what they are."""
        qkv = [
            torch.randn(sum(new.values()), h, self.dim).to(self.dtype) for h in (self.heads_q,) + (self.heads_kv,) * 2
        ]
        starts, slots, lengths, at = [0], [], [], 0
        for name, count in new.items():
            pair = (qkv[1][at : at + count], qkv[2][at : at + count])
            old = self.history.get(name)
            before = 0 if old is None else len(old[0])
            self.history[name] = pair if old is None else tuple(torch.cat(both) for both in zip(old, pair, strict=True))
            table = self.tables.setdefault(name, [])
            while len(table) * self.size < before + count:
                table.append(self.free.pop())
            slots += [table[t // self.size] * self.size + t % self.size for t in range(before, before + count)]
            lengths.append(before + count)
            at += count
            starts.append(at)
        width = max(map(len, self.tables.values())) + 1
        rows = [
            self.tables[name] + [-7] * (width - len(self.tables[name])) for name in new
        ]  # vLLM leaves rubbish there
        index = {"dtype": torch.int32}
        seq_lens = torch.tensor(lengths, **index)
        batch = CommonAttentionMetadata(
            query_start_loc=torch.tensor(starts, **index),
            query_start_loc_cpu=torch.tensor(starts, **index),
            seq_lens=seq_lens,
            num_reqs=len(new),
            num_actual_tokens=at,
            max_query_len=max(new.values()),
            max_seq_len=max(lengths),
            block_table_tensor=torch.tensor(rows, **index),
            slot_mapping=torch.tensor(slots),
            seq_lens_cpu_upper_bound=seq_lens.clone() if known_lengths else None,
            **batch_fields,
        )
        return batch, *qkv
