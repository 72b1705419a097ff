"""Real vLLM engines side by side, one for each attention backend: milliseconds a token, seconds of prefill, the tokens.

    python -m bench.engine --json record.json
    python -m bench.engine --backends FLASH_ATTN,WARPATTN --graphs FULL_DECODE_ONLY --layers 32 --rounds 3

Every backend has an engine in a process of its own, on one card. They take turns in every round, and ratios are taken
within a round, because the host's speed moves a step by some ten percent from minute to minute. The model has the shape
of Llama 3 8B with random weights (`load_format="dummy"`), so nothing is downloaded; decoding is greedy. Time per token
is that of many tokens less that of a quarter of them, over the difference, so that all requests decode in it. Where
vLLM takes no new names (before 0.32), WARPATTN is its CUSTOM.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000, "hidden_act": "silu",
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CASES = {"1 x 4k": (1, 4096), "32 x 4k": (32, 4096), "1 x 32k": (1, 32000), "128 x 1k": (128, 1024)}
MIXED = (96, 500, 3500, 128)  # requests, shortest and longest prompt, new tokens: chunks beside decoding requests
SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128)  # of captured batches


class Work(NamedTuple):
    """What an engine is to do next: prompts of these lengths, and new tokens of each."""

    lengths: tuple[int, ...]
    seed: int
    tokens: int


class Done(NamedTuple):
    """How long it took, and what was generated."""

    seconds: float
    tokens: list[list[int]]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", default="FLASH_ATTN,WARPATTN", help="the first one is the peer")
    parser.add_argument("--case", action="append", choices=[*CASES, "mixed"], help="one or more; default: all")
    parser.add_argument("--graphs", default="FULL_DECODE_ONLY", help="vLLM's cudagraph_mode")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of a request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache-gib", type=int, default=24, help="of keys and values, each engine")
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args()
    names = args.backends.split(",")
    context = multiprocessing.get_context("spawn")
    pipes = {}
    for name in names:
        pipes[name], theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, name, args), daemon=True).start()
    up = {name: pipe.recv() for name, pipe in pipes.items()}
    print("engines up after", {name: round(seconds, 1) for name, seconds in up.items()}, flush=True)
    record = {"graphs": args.graphs, "layers": args.layers, "up_s": up, "cases": {}}
    for case in args.case or [*CASES, "mixed"]:
        record["cases"][case] = measure(pipes, case, args)
        print("\n".join(lines_of(case, record["cases"][case], names)), flush=True)
        if args.json:
            args.json.write_text(json.dumps(record, indent=1))
    for pipe in pipes.values():
        pipe.send(None)


def serve(pipe: Connection, name: str, args: argparse.Namespace) -> None:
    """One engine: seconds until it is up, then a `Done` for every `Work`, until there is None."""
    begin = time.perf_counter()
    llm = engine(name, args)
    pipe.send(time.perf_counter() - begin)
    while (work := pipe.recv()) is not None:
        pipe.send(generate(llm, random_prompts(work.lengths, work.seed), work.tokens))


def measure(pipes: dict[str, Connection], case: str, args: argparse.Namespace) -> dict[str, Any]:
    """A case by every engine in turn: medians, and those of the ratios to the first one."""
    if case == "mixed":
        requests, shortest, longest, tokens = MIXED
        chance = random.Random(0)
        lengths, counts = tuple(chance.randint(shortest, longest) for _ in range(requests)), (tokens,)
    else:
        requests, length = CASES[case]
        lengths, counts = (length,) * requests, (1, args.tokens // 4, args.tokens)
    rounds: list[dict[str, list[Done]]] = []
    for pipe in pipes.values():  # makes plans and warms up
        pipe.send(Work(lengths, requests, counts[len(counts) // 2]))
        pipe.recv()
    for number in range(args.rounds):
        found: dict[str, list[Done]] = {name: [] for name in pipes}
        for count in counts:
            for name in list(pipes)[:: 1 if number % 2 else -1]:
                pipes[name].send(Work(lengths, requests, count))
                found[name].append(pipes[name].recv())
        rounds.append(found)
    peer, *_ = pipes
    results: dict[str, Any] = {}
    for name in pipes:
        taken = [numbers(found[name], counts, sum(lengths)) for found in rounds]
        theirs = [numbers(found[peer], counts, sum(lengths)) for found in rounds]
        results[name] = {key: statistics.median([each[key] for each in taken]) for key in taken[0]}
        for key in taken[0]:
            ratios = [own[key] / other[key] for own, other in zip(taken, theirs, strict=True)]
            results[name][f"{key} ratios"] = [round(ratio, 3) for ratio in ratios]
        same = zip(rounds[0][name][-1].tokens, rounds[0][peer][-1].tokens, strict=True)
        results[name]["same tokens"] = f"{sum(a == b for a, b in same)} of {requests}"
    return results


def numbers(done: Sequence[Done], counts: Sequence[int], prompt_tokens: int) -> dict[str, float]:
    """What the generations of a round say."""
    if len(counts) == 1:
        new = counts[0] * len(done[0].tokens)
        return {"tokens/s": (prompt_tokens + new) / done[0].seconds}
    some, every = done[1:]
    per_token = 1000 * (every.seconds - some.seconds) / (counts[2] - counts[1])
    return {"ms a token": per_token, "s of prefill": done[0].seconds, "s in all": every.seconds}


def lines_of(case: str, results: dict[str, Any], names: Sequence[str]) -> list[str]:
    """A line for every number of a case."""
    lines = []
    for key in [key for key in results[names[0]] if f"{key} ratios" in results[names[0]]]:
        shown = "  ".join(f"{name} {results[name][key]:10.4g}" for name in names)
        others = "  ".join(f"{statistics.median(results[name][f'{key} ratios']):.3f}" for name in names[1:])
        lines.append(f"{case:10s}{key:14s}{shown}  ratio {others}  {results[names[-1]]['same tokens']} the same")
    return lines


def engine(name: str, args: argparse.Namespace) -> Any:
    """An LLM in this process."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    from vllm import LLM

    if name == "WARPATTN":
        from warpattn.integrations import vllm_plugin

        vllm_plugin.register()
        from warpattn.integrations.vllm import WarpattnBackend

        name = WarpattnBackend.get_name()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": args.layers}))
        return LLM(
            model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=33024,
            max_num_seqs=SIZES[-1], max_num_batched_tokens=8192, enable_prefix_caching=False,
            gpu_memory_utilization=0.4, kv_cache_memory_bytes=args.cache_gib << 30, attention_config={"backend": name},
            compilation_config={"mode": 0, "cudagraph_mode": args.graphs, "cudagraph_capture_sizes": list(SIZES)},
        )  # fmt: skip


def random_prompts(lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Token numbers."""
    chance = random.Random(seed)
    return [[chance.randrange(10, SHAPE["vocab_size"]) for _ in range(length)] for length in lengths]


def generate(llm: Any, prompts: Sequence[Sequence[int]], tokens: int) -> Done:
    """New tokens of every prompt."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    found = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)
    return Done(time.perf_counter() - begin, [list(x.outputs[0].token_ids) for x in found])


if __name__ == "__main__":
    main()
