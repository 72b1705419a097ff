"""A real vLLM engine, generating with one attention backend: milliseconds per token, seconds of prefill, the tokens.

    python -m bench.engine --backend FLASH_ATTN --json fa3.json
    python -m bench.engine --backend WARPATTN --json ours.json
    python -m bench.engine --compare fa3.json ours.json

The model has the shape of Llama 3 8B with fewer layers and random weights (`load_format="dummy"`), so nothing is
downloaded; decoding is greedy. Time per token is that of many tokens less that of one, over the difference. Each
backend needs a process of its own. Where vLLM takes no new names (before 0.32), WARPATTN is its CUSTOM.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000, "hidden_act": "silu",
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CASES = {"1 x 4k": (1, 4096), "32 x 4k": (32, 4096), "1 x 32k": (1, 32000), "128 x 1k": (128, 1024)}
MIXED = (96, 500, 3500, 128)  # requests, shortest and longest prompt, new tokens: chunks beside decoding requests
SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128)  # of captured batches


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="WARPATTN")
    parser.add_argument("--graphs", default="FULL_DECODE_ONLY", help="vLLM's cudagraph_mode")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of a request")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="count the kernels of decode steps")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--compare", type=Path, nargs=2, help="two records: theirs, ours")
    args = parser.parse_args()
    if args.compare:
        print("\n".join(compared(*[json.loads(path.read_text()) for path in args.compare])))
        return
    record = measure(args)
    print(json.dumps({key: value for key, value in record.items() if key != "tokens"}))
    if args.json:
        args.json.write_text(json.dumps(record))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All cases by one engine."""
    begin = time.perf_counter()
    llm = engine(args)
    record: dict[str, Any] = {
        "backend": args.backend, "graphs": args.graphs, "layers": args.layers, "up_s": time.perf_counter() - begin,
        "ms": {}, "prefill_s": {}, "tokens": {},
    }  # fmt: skip
    for name, (requests, length) in CASES.items():
        prompts = random_prompts([length] * requests, seed=requests)
        generate(llm, prompts, 4)
        first = [generate(llm, prompts, 1)[0] for _ in range(args.runs)]
        every = [generate(llm, prompts, args.tokens) for _ in range(args.runs)]
        record["prefill_s"][name] = statistics.median(first)
        seconds = statistics.median([seconds for seconds, _ in every]) - record["prefill_s"][name]
        record["ms"][name] = 1000 * seconds / (args.tokens - 1)
        record["tokens"][name] = every[0][1]
        print(f"{name}: {record['ms'][name]:.3f} ms a token, {record['prefill_s'][name]:.4f} s of prefill", flush=True)
    requests, shortest, longest, tokens = MIXED
    chance = random.Random(0)
    prompts = random_prompts([chance.randint(shortest, longest) for _ in range(requests)], seed=0)
    generate(llm, prompts, 4)
    seconds = statistics.median([generate(llm, prompts, tokens)[0] for _ in range(args.runs)])
    record["mixed_tokens_s"] = (sum(map(len, prompts)) + requests * tokens) / seconds
    print(f"mixed: {record['mixed_tokens_s']:.0f} tokens/s", flush=True)
    if args.profile:
        record["kernels"] = kernels(llm, args)
    return record


def engine(args: argparse.Namespace) -> Any:
    """An LLM in this process."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    from vllm import LLM

    name = args.backend
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
            gpu_memory_utilization=0.6, attention_config={"backend": name},
            compilation_config={"mode": 0, "cudagraph_mode": args.graphs, "cudagraph_capture_sizes": list(SIZES)},
        )  # fmt: skip


def random_prompts(lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Token numbers."""
    chance = random.Random(seed)
    return [[chance.randrange(10, SHAPE["vocab_size"]) for _ in range(length)] for length in lengths]


def generate(llm: Any, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, list[list[int]]]:
    """(seconds, generated tokens of every prompt)."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    found = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)
    return time.perf_counter() - begin, [list(x.outputs[0].token_ids) for x in found]


def kernels(llm: Any, args: argparse.Namespace) -> dict[str, list[float]]:
    """Kernels of a decode step of one request: how many a step, and microseconds of one."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    prompts, steps = random_prompts([4096], seed=1), 16
    counts: list[Counter[str]] = []
    spent: list[Counter[str]] = []
    for tokens in (1, 1 + steps):
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            generate(llm, prompts, tokens)
            torch.cuda.synchronize()
        events = [event for event in seen.events() if event.device_type.name == "CUDA"]
        counts.append(Counter(event.name for event in events))
        times: Counter[str] = Counter()
        for event in events:
            times[event.name] += event.device_time
        spent.append(times)
    more = {name: n - counts[0][name] for name, n in counts[1].items() if n > counts[0][name]}
    found = {name[:80]: [n / steps, (spent[1][name] - spent[0][name]) / n] for name, n in more.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1][0] * item[1][1]))


def compared(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """The table of two records."""
    lines = [f"{'':12s}{theirs['backend']:>14s}{ours['backend']:>14s}  ratio   same tokens"]
    for name in CASES:
        a, b = theirs["ms"][name], ours["ms"][name]
        pairs = list(zip(theirs["tokens"][name], ours["tokens"][name], strict=True))
        same = sum(x == y for x, y in pairs)
        lines.append(f"{name:12s}{a:11.3f} ms{b:11.3f} ms  {b / a:.3f}   {same} of {len(pairs)} requests")
    for name in CASES:
        a, b = theirs["prefill_s"][name], ours["prefill_s"][name]
        lines.append(f"{name:12s}{a:11.4f} s {b:11.4f} s   {b / a:.3f}   prefill")
    a, b = theirs["mixed_tokens_s"], ours["mixed_tokens_s"]
    lines.append(f"{'mixed':12s}{a:10.0f} t/s{b:10.0f} t/s  {b / a:.3f}   more is better")
    return lines


if __name__ == "__main__":
    main()
