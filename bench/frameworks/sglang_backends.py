"""A step of SGLang's attention, by its Triton backend and by ours: tables of the step, then eight layers.

SGLang's own registry, cache pools, attention layers and batches, called in the order of its model runner. Each layer
writes its new keys and values into the cache. A captured step fills its tables and replays a CUDA graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from bench.frameworks.sglang_imports import attention_classes
from bench.frameworks.timing import Case, Group, Way, largest_error, nothing
from bench.peers import OWN
from warpattn.integrations.sglang_plugin import register

LAYERS, PAGE = 8, 16
PEER = "triton"
DECODES = {"32 x 4k": (32, 4096), "1 x 16k": (1, 16384), "128 x 1k": (128, 1024)}


class Shape(NamedTuple):
    """Heads, and where they are."""

    heads: int
    heads_kv: int
    dim: int
    device: str
    dtype: torch.dtype
    divisor: int  # of lengths


CARD = Shape(32, 8, 128, "cuda", torch.bfloat16, 1)
SMOKE = Shape(4, 2, 16, "cpu", torch.float32, 128)


def groups(smoke: bool) -> list[Group]:
    """Everything that is timed."""
    shape = SMOKE if smoke else CARD
    cases: dict[str, Callable[[Any], Case]] = {}
    for name, (requests, length) in DECODES.items():
        cases[f"decode {name}"] = functools.partial(decode, shape, requests, length, False)
        if not smoke:
            cases[f"decode {name}, CUDA graph"] = functools.partial(decode, shape, requests, length, True)
    cases["prefill 4 x 4k"] = functools.partial(prefill, shape, 4, 4096)
    title = f"{shape.heads}/{shape.heads_kv} heads x {shape.dim}, {LAYERS} layers"
    return [Group("sglang", title, classes, cases)]


def classes() -> Any:
    """SGLang's classes, with our backend among them and its arguments as they are by default."""
    found = attention_classes()
    register()
    from warpattn.integrations.sglang import scope

    values = SimpleNamespace(
        speculative_algorithm=None, speculative_eagle_topk=None, speculative_num_draft_tokens=None,
        speculative_num_steps=None, attn_cp_size=1, attn_dcp_size=1, attn_dcp_rank=0, attn_tp_size=1,
        dllm=SimpleNamespace(dllm_algorithm=None), chunked_prefill_size=8192,
        kernel=SimpleNamespace(
            enable_lean_attention=None, triton_attention_num_kv_splits=8, triton_attention_split_tile_size=None
        ),
        deterministic=SimpleNamespace(enable_deterministic_inference=False),
    )  # fmt: skip
    for module in (scope, found.triton):
        for name in ("get_exec", "get_parallel", "get_schedule", "get_spec"):
            setattr(module, name, lambda: values)
    return found


class Engine:
    """Requests of equal length with their slots in SGLang's pools, and a backend of each kind."""

    def __init__(self, sglang: Any, shape: Shape, requests: int, length: int) -> None:
        torch.manual_seed(0)
        self.sglang, self.shape, self.count = sglang, shape, requests
        self.length = length // shape.divisor
        pages = -(-self.length // PAGE)
        self.requests = sglang.ReqToTokenPool(requests, pages * PAGE, shape.device, False)
        order = torch.randperm(requests * pages, device=shape.device).reshape(requests, pages, 1) + 1
        slots = (order * PAGE + torch.arange(PAGE, device=shape.device)).flatten(1)
        self.rows = torch.arange(1, requests + 1, device=shape.device)  # SGLang keeps the first one for padding
        self.requests.req_to_token[self.rows] = slots.int()
        self.slots = slots[:, : self.length]
        self.pool = sglang.MHATokenToKVPool(
            (requests * pages + 1) * PAGE, PAGE, shape.dtype, shape.heads_kv, shape.dim, LAYERS, shape.device, False,
            enable_alt_stream=False,
        )  # fmt: skip
        for index in range(LAYERS):
            self.pool.get_key_buffer(index).normal_()
            self.pool.get_value_buffer(index).normal_()
        self.layers = [
            sglang.RadixAttention(shape.heads, shape.dim, shape.dim**-0.5, shape.heads_kv, index)
            for index in range(LAYERS)
        ]
        self.runner = self._runner()

    def _runner(self) -> Any:
        """What the backends read of a model runner."""
        shape, sglang = self.shape, self.sglang
        model = SimpleNamespace(
            is_encoder_decoder=False, is_local_attention_model=False, attention_arch=sglang.AttentionArch.MHA,
            get_max_num_attention_heads=lambda: shape.heads, get_num_kv_heads=lambda *_: shape.heads_kv,
            head_dim=shape.dim, v_head_dim=shape.dim, swa_v_head_dim=shape.dim, context_len=self.length + PAGE,
            hf_config=transformers.LlamaConfig(), linear_attn_registry_result=None, is_draft_model=False,
        )  # fmt: skip
        translator = sglang.KVIndexTranslator(
            req_to_token=self.requests.req_to_token, token_to_kv_pool_allocator=None, token_to_kv_pool=self.pool,
            page_size=PAGE, device=shape.device,
        )  # fmt: skip
        return SimpleNamespace(
            req_to_token_pool=self.requests, token_to_kv_pool=self.pool, token_to_kv_pool_allocator=None,
            page_size=PAGE, use_mla_backend=False, is_draft_worker=False, model_config=model, device=shape.device,
            gpu_id=0, sliding_window_size=None, kv_index_translator=translator, decode_num_tokens_per_req=lambda: 1,
            kv_cache_dtype=shape.dtype,
        )  # fmt: skip

    def new(self, tokens: int) -> list[Tensor]:
        """q, k and v of so many new tokens a request, as a model's projections hand them over."""
        total, shape = self.count * tokens, self.shape
        draw = functools.partial(torch.randn, device=shape.device, dtype=shape.dtype)
        return [draw(total, heads * shape.dim) for heads in (shape.heads, shape.heads_kv, shape.heads_kv)]

    def batch(self, tokens: int) -> Any:
        """A step with the last `tokens` tokens of every request."""
        device, modes = self.shape.device, self.sglang.ForwardMode
        lengths = torch.full((self.count,), self.length, dtype=torch.int64, device=device)
        batch = self.sglang.ForwardBatch(
            forward_mode=modes.DECODE if tokens == 1 else modes.EXTEND, batch_size=self.count,
            input_ids=torch.zeros(self.count * tokens, dtype=torch.int64, device=device), req_pool_indices=self.rows,
            seq_lens=lengths, out_cache_loc=self.slots[:, self.length - tokens :].reshape(-1),
            seq_lens_sum=self.count * self.length, seq_lens_cpu=lengths.cpu(),
        )  # fmt: skip
        if tokens > 1:
            batch.extend_seq_lens = torch.full_like(lengths, tokens).int()
            batch.extend_prefix_lens = (lengths - tokens).int()
            batch.extend_seq_lens_cpu = [tokens] * self.count
            batch.extend_prefix_lens_cpu = [self.length - tokens] * self.count
        self.runner.kv_index_translator.own_plan(batch).bind(batch, self.runner.kv_index_translator)
        return batch

    def attend(self, backend: Any, batch: Any, given: list[Tensor]) -> Tensor:
        """All layers; the last one's output."""
        q, k, v = given
        heads = self.shape.heads_kv, self.shape.dim
        for layer in self.layers:
            out = backend.forward(q, k.view(-1, *heads), v.view(-1, *heads), layer, batch)  # as RadixAttention does
        return out

    def exact(self, given: list[Tensor]) -> Tensor:
        """The last layer's output in fp32, over keys and values that it writes first."""
        shape, last = self.shape, LAYERS - 1
        heads = (shape.heads, shape.heads_kv, shape.heads_kv)
        q, k, v = (x.view(self.count, -1, count, shape.dim) for x, count in zip(given, heads, strict=True))
        new = q.shape[1]
        keys, values = (get(last)[self.slots] for get in (self.pool.get_key_buffer, self.pool.get_value_buffer))
        keys[:, -new:], values[:, -new:] = k, v
        visible = torch.ones(new, self.length, dtype=torch.bool, device=shape.device).tril(self.length - new)
        rows, group = [], shape.heads // shape.heads_kv
        for one in range(self.count):
            for head in range(shape.heads):
                key, value = keys[one, :, head // group].float(), values[one, :, head // group].float()
                scores = q[one, :, head].float() @ key.T * shape.dim**-0.5
                rows.append(scores.masked_fill(~visible, -torch.inf).softmax(1) @ value)
        return torch.stack(rows).unflatten(0, (self.count, -1)).transpose(1, 2).flatten(2).flatten(0, 1)

    def written(self, given: list[Tensor], tokens: int) -> bool:
        """Whether every layer's cache holds the new keys and values."""
        slots = self.slots[:, self.length - tokens :].reshape(-1)
        k, v = (x.view(-1, self.shape.heads_kv, self.shape.dim) for x in given[1:])
        return all(
            torch.equal(self.pool.get_key_buffer(index)[slots], k)
            and torch.equal(self.pool.get_value_buffer(index)[slots], v)
            for index in range(LAYERS)
        )

    def empty(self, tokens: int) -> None:
        """Takes the new keys and values out of the cache."""
        slots = self.slots[:, self.length - tokens :].reshape(-1)
        for index in range(LAYERS):
            self.pool.get_key_buffer(index)[slots] = 0
            self.pool.get_value_buffer(index)[slots] = 0


Make = Callable[[Any, Any, list[Tensor]], Callable[[], Tensor]]  # of a backend, a batch, q, k and v


def case_of(engine: Engine, tokens: int, make: Make) -> Case:
    """A step by both backends; `make` gives the call that is timed."""
    given, batch = engine.new(tokens), engine.batch(tokens)
    true = engine.exact(given)
    ways = {}
    for name in (PEER, OWN):
        ways[name] = Way(nothing, Lazy(functools.partial(made, engine, name, make, batch, given)))

    def error(found: Tensor) -> float:
        if not engine.written(given, tokens):
            raise RuntimeError("the cache lacks the new keys and values")
        engine.empty(tokens)
        return largest_error(found, true)

    engine.empty(tokens)
    return Case(ways, error, engine.count * tokens)


class Lazy:
    """A call that is made when it is first called, so that what cannot be made is a line of the table."""

    def __init__(self, make: Callable[[], Callable[[], Any]]) -> None:
        self._make, self._call = make, None

    def __call__(self) -> Any:
        if self._call is None:
            self._call = self._make()
        with torch.inference_mode():
            return self._call()


def made(engine: Engine, name: str, make: Make, batch: Any, given: list[Tensor]) -> Callable[[], Tensor]:
    """The call of one backend."""
    with torch.inference_mode():
        return make(engine.sglang.ATTENTION_BACKENDS[name](engine.runner), batch, given)


def decode(shape: Shape, requests: int, length: int, captured: bool, sglang: Any) -> Case:
    """One new token of every request."""
    engine = Engine(sglang, shape, requests, length)
    return case_of(engine, 1, functools.partial(graph if captured else eager, engine))


def prefill(shape: Shape, requests: int, length: int, sglang: Any) -> Case:
    """Whole prompts."""
    engine = Engine(sglang, shape, requests, length)
    return case_of(engine, engine.length, functools.partial(eager, engine))


def eager(engine: Engine, backend: Any, batch: Any, given: list[Tensor]) -> Callable[[], Tensor]:
    """A step that no graph holds."""

    def step() -> Tensor:
        backend.init_forward_metadata(batch)
        return engine.attend(backend, batch, given)

    return step


def graph(engine: Engine, backend: Any, batch: Any, given: list[Tensor]) -> Callable[[], Tensor]:
    """A step whose layers are in a CUDA graph."""
    backend.init_cuda_graph_state(engine.count, engine.count)
    held, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with engine.sglang.model_capture_mode():  # the Triton backend chooses another kernel there
        with torch.cuda.stream(side):
            for _ in range(2):  # compiles
                backend.init_forward_metadata_out_graph(batch, in_capture=True)
                backend.init_forward_metadata_in_graph(batch)
                engine.attend(backend, batch, given)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(held):
            backend.init_forward_metadata_in_graph(batch)
            out = engine.attend(backend, batch, given)

    def step() -> Tensor:
        backend.init_forward_metadata_out_graph(batch)
        held.replay()
        return out

    return step
