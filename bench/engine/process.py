"""One engine in a process of its own: it does what `bench.engine` sends it and says when each step ended.

vLLM's is here, SGLang's in `served_by_sglang`. Times are read where the engine hands out a step's tokens, so a run of
`LLM.generate` shows its prompts and each step of decoding by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import statistics
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

LLAMA = {  # Llama 3 8B
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000,
    "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "torch_dtype": "bfloat16", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# gpt-oss 20B, with one expert as large as the four that a token uses: experts are no part of attention.
GPT_OSS = LLAMA | {
    "hidden_size": 2880, "intermediate_size": 4 * 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
    "head_dim": 64, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12,
}  # fmt: skip
# DeepSeek V2 Lite without experts.
LATENT = LLAMA | {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
    "intermediate_size": 10944, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
    "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "first_k_dense_replace": 27, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
}  # fmt: skip
MODELS = {"llama": LLAMA, "gpt-oss": GPT_OSS, "latent": LATENT}
WITH_SINKS = ("gpt-oss",)
LATENT_NAMES = {"FLASH_ATTN": "FLASH_ATTN_MLA"}  # of backends that have another one for latent attention
REQUESTS = 128  # at once
SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # tokens of captured steps, as far as chosen
LONGEST = 33024  # tokens of a request
NGRAMS = "bench.engine.drafts.NGrams"
SHOWN = 12  # kernels of a profile


class Work(NamedTuple):
    """What an engine is to do next: prompts of these lengths, and new tokens of each. Equal seeds make equal prompts,
    which the engine then finds in its cache."""

    lengths: tuple[int, ...]
    seed: str
    tokens: int
    profile: bool = False


class Kernel(NamedTuple):
    """One kernel in a profile: times it ran, microseconds of all of them, their median, and those in which nothing ran
    before it."""

    name: str
    times: int
    microseconds: float
    median: float
    idle: float


class Done(NamedTuple):
    """How long it took, milliseconds of each step in which every request got a token, and what was generated."""

    seconds: float
    steps: list[float]
    tokens: list[list[int]]
    kernels: list[Kernel]


class Weights(NamedTuple):
    """Where a model's weights go to, and where they come from if another engine has them; see `one_memory`."""

    give: tuple[Connection, ...] = ()
    take: Connection | None = None


class Kind(NamedTuple):
    """A kind of engine: what starts one, does a `Work` with it and ends it, and whether it starts no processes."""

    start: Callable[[str, str, Weights, argparse.Namespace], Any]
    generate: Callable[[Any, Work], Done]
    stop: Callable[[Any], None]
    alone: bool


def serve(kind: Kind, pipe: Connection, model: str, backend: str, weights: Weights, args: argparse.Namespace) -> None:
    """One engine: seconds until it is up, then a `Done` for every `Work` until None comes; a text where one failed."""
    begin = time.perf_counter()
    llm = attempt(pipe, lambda: kind.start(model, backend, weights, args))
    if llm is None:
        return
    pipe.send(time.perf_counter() - begin)
    while (work := pipe.recv()) is not None:
        done = attempt(pipe, lambda work=work: kind.generate(llm, work))
        if done is not None:
            pipe.send(done)
    kind.stop(llm)


def attempt(pipe: Connection, do: Callable[[], Any]) -> Any:
    """What `do` returns; None where it failed, which the other end of the pipe is told."""
    try:
        return do()
    except Exception:
        pipe.send(traceback.format_exc(limit=-6))
        return None


def engine(model: str, backend: str, weights: Weights, args: argparse.Namespace) -> Any:
    """An LLM in this process, with random weights: nothing is downloaded."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    from vllm import LLM
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()  # saves a process that imports everything again
    one_memory(weights)
    backend = backend.partition("~")[0]
    if backend == "WARPATTN":
        backend = registered(model)
    elif model == "latent":
        backend = LATENT_NAMES.get(backend, backend)
    if model in WITH_SINKS:
        give_sinks()
    config = dict(MODELS[model])
    if args.layers:
        config["num_hidden_layers"] = args.layers
    sizes = [size for size in SIZES if size <= args.captured]
    drafts = {"method": "custom_class", "model": NGRAMS, "num_speculative_tokens": args.drafts} if args.drafts else None
    mode = 3 if args.inductor else 0
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        return LLM(
            model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=LONGEST,
            max_num_seqs=REQUESTS, max_num_batched_tokens=args.step_tokens, enable_prefix_caching=True,
            gpu_memory_utilization=0.1, kv_cache_memory_bytes=args.cache_gib << 30,
            attention_config={"backend": backend},
            compilation_config={"mode": mode, "cudagraph_mode": args.graphs, "cudagraph_capture_sizes": sizes},
            speculative_config=drafts,
        )  # fmt: skip


def one_memory(weights: Weights) -> None:
    """Let the engines of a model read the same memory: where weights are in it moves a product's time by percents."""
    import torch
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    load = DummyModelLoader.load_weights

    def shared(self: Any, model: Any, config: Any) -> None:
        if weights.take is None:
            load(self, model, config)
        else:
            given = weights.take.recv()
            for name, parameter in model.named_parameters():
                parameter.data = given[name]
        held = {name: parameter.detach().as_subclass(torch.Tensor) for name, parameter in model.named_parameters()}
        for pipe in weights.give:
            pipe.send(held)

    DummyModelLoader.load_weights = shared


def registered(model: str) -> str:
    """The name of our backend for a model, which vLLM knows now."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from warpattn.integrations import vllm_plugin

    vllm_plugin.register()
    if model != "latent":
        from warpattn.integrations.vllm import WarpattnBackend

        return WarpattnBackend.get_name()
    from warpattn.integrations.vllm.latent import NAME, WarpattnMLABackend

    name = WarpattnMLABackend.get_name()
    register_backend(AttentionBackendEnum[name], vllm_plugin.LATENT[NAME])  # CUSTOM is another one's by now
    return name


def give_sinks() -> None:
    """Attention of vLLM's Llama gets a random sink for each head."""
    import torch
    from vllm.model_executor.models import llama

    class WithSinks(llama.Attention):
        def __init__(self, num_heads: int, *arguments: Any, **named: Any) -> None:
            super().__init__(num_heads, *arguments, sinks=torch.randn(num_heads), **named)

    llama.Attention = WithSinks


def random_prompts(lengths: Sequence[int], seed: str) -> list[list[int]]:
    """Token numbers."""
    chance = random.Random(seed)
    return [chance.choices(range(10, LLAMA["vocab_size"]), k=length) for length in lengths]


def generate(llm: Any, work: Work) -> Done:
    """New tokens of every prompt."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": prompt} for prompt in random_prompts(work.lengths, work.seed)]
    params = SamplingParams(temperature=0.0, max_tokens=work.tokens, ignore_eos=True, detokenize=False)
    core, ends = llm.llm_engine.engine_core, []
    get_output = core.get_output

    def noted() -> Any:
        outputs = get_output()
        if len(outputs.outputs) == len(prompts):
            ends.append(time.perf_counter())
        return outputs

    core.get_output = noted
    try:
        with profiled(work.profile) as kernels:
            begin = time.perf_counter()
            found = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - begin
    finally:
        del core.get_output
    steps = [1000 * (end - start) for start, end in itertools.pairwise(ends)]
    return Done(seconds, steps, [list(x.outputs[0].token_ids) for x in found], kernels)


def stop(llm: Any) -> None:
    """It ends with its process."""


@contextlib.contextmanager
def profiled(wanted: bool) -> Iterator[list[Kernel]]:
    """A list that holds the kernels which took longest once the block has ended; it stays empty if not `wanted`."""
    kernels: list[Kernel] = []
    if not wanted:
        yield kernels
        return
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        yield kernels
    ran = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    took: defaultdict[str, list[float]] = defaultdict(list)
    idle: defaultdict[str, float] = defaultdict(float)
    end = ran[0].time_range.start if ran else 0.0
    for event in sorted(ran, key=lambda event: event.time_range.start):
        took[event.name].append(event.time_range.elapsed_us())
        idle[event.name] += max(0.0, event.time_range.start - end)
        end = max(end, event.time_range.end)
    longest = sorted(took, key=lambda name: -sum(took[name]))[:SHOWN]
    kernels += [Kernel(name, len(t := took[name]), sum(t), statistics.median(t), idle[name]) for name in longest]
