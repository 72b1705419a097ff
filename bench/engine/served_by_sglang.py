"""One SGLang engine for `bench.engine`, as `process` has vLLM's.

Its scheduler is a process that the engine starts. There each step's end is noted where SGLang hands out its tokens, in
a file that the engine's process reads once a run has ended.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from bench.engine.process import LONGEST, MODELS, SIZES, Done, Weights, Work, random_prompts

NOTED = "WARPATTN_BENCH_STEPS"  # the variable that names the file


class Served(NamedTuple):
    """An engine, and the file of its steps."""

    engine: Any
    noted: Path


class Step(NamedTuple):
    """A step that has ended: when, what it was for SGLang, and how many requests it had."""

    end: float
    mode: str
    requests: int


def engine(model: str, backend: str, weights: Weights, args: argparse.Namespace) -> Served:
    """An engine with random weights, up and running: nothing is downloaded."""
    config = dict(MODELS[model])
    if args.layers:
        config["num_hidden_layers"] = args.layers
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    noted = folder / "steps"
    os.environ.update({NOTED: str(noted), "HF_HUB_OFFLINE": "1"})
    from sglang.srt.entrypoints.engine import Engine

    class Noted(Engine):
        run_scheduler_process_func = staticmethod(schedule)

    return Served(Noted(model_path=str(folder), **settings(config, backend.partition("~")[0], args)), noted)


def settings(config: dict[str, Any], backend: str, args: argparse.Namespace) -> dict[str, Any]:
    """Of SGLang: the same for every backend, and like vLLM's."""
    slot = config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 2 * 2  # bytes
    return {
        "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "attention_backend": backend,
        "page_size": 16, "context_length": LONGEST, "max_running_requests": SIZES[-1], "chunked_prefill_size": 8192,
        "max_prefill_tokens": 8192, "max_total_tokens": (args.cache_gib << 30) // slot, "mem_fraction_static": 0.95,
        "cuda_graph_bs_decode": list(SIZES), "disable_decode_cuda_graph": args.graphs == "NONE",
        "disable_prefill_cuda_graph": args.graphs != "FULL", "sampling_backend": "pytorch", "grammar_backend": "none",
        "random_seed": 0, "log_level": "error",
    }  # fmt: skip


def schedule(*given: Any, **named: Any) -> None:
    """SGLang's scheduler process, which notes its steps."""
    from sglang.srt.managers import scheduler

    note_steps(scheduler.Scheduler, Path(os.environ[NOTED]))
    scheduler.run_scheduler_process(*given, **named)


def note_steps(kind: Any, noted: Path) -> None:
    """Let a scheduler write down the steps of each run: the file is there once no request is left."""
    done, steps = kind.process_batch_result, []

    def process(self: Any, batch: Any, result: Any) -> None:
        mode, requests = batch.forward_mode.name, list(batch.reqs)
        done(self, batch, result)
        steps.append(Step(time.perf_counter(), mode, len(requests)))
        if mode == "DECODE" and all(request.finished() for request in requests):
            if any(step.mode != "DECODE" for step in steps):  # not the step that began before the end was known
                written = noted.with_suffix(".part")
                written.write_text(json.dumps(steps))
                written.rename(noted)
            steps.clear()

    kind.process_batch_result = process


def generate(served: Served, work: Work) -> Done:
    """New tokens of every prompt."""
    prompts = random_prompts(work.lengths, work.seed)
    params = {"temperature": 0.0, "max_new_tokens": work.tokens, "ignore_eos": True}
    served.noted.unlink(missing_ok=True)
    begin = time.perf_counter()
    found = served.engine.generate(input_ids=prompts, sampling_params=params)
    seconds = time.perf_counter() - begin
    steps = times_of(steps_of(served.noted), len(prompts)) if work.tokens > 1 else []
    return Done(seconds, steps, [one["output_ids"] for one in found], [])


def steps_of(noted: Path, patience: float = 10.0) -> list[Step]:
    """What the scheduler noted of a run; it may still be writing."""
    until = time.perf_counter() + patience
    while not noted.exists():
        if time.perf_counter() > until:
            raise RuntimeError("SGLang's scheduler noted no steps")
        time.sleep(0.02)
    return [Step(*one) for one in json.loads(noted.read_text())]


def times_of(steps: list[Step], requests: int) -> list[float]:
    """Milliseconds of each step in which every request got a token after one in which they did, too."""
    full = [step.mode == "DECODE" and step.requests == requests for step in steps]
    return [1000 * (b.end - a.end) for a, b, *both in zip(steps, steps[1:], full, full[1:], strict=False) if all(both)]


def stop(served: Served) -> None:
    """Ends its processes."""
    served.engine.shutdown()
