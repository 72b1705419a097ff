"""Real vLLM or SGLang engines side by side, one for each backend: milliseconds a token, seconds of prefill, tokens/s.

    python -m bench.engine --json record.json
    python -m bench.engine --models llama --backends FLASH_ATTN,WARPATTN --graphs FULL_DECODE_ONLY --rounds 3
    python -m bench.engine --models llama,latent --case "32 x 4k" --case "latent mixed"     # a model's own case
    python -m bench.engine --backends FLASH_ATTN,WARPATTN,FLASH_ATTN~2,WARPATTN~2           # two engines of each
    python -m bench.engine --graphs FULL --captured 1024 --step-tokens 1024 --drafts 3      # graphs hold all steps
    python -m bench.engine --engine sglang --models llama --backends fa3,warpattn

SGLang runs `llama`; its engines have weights of their own each, and show no kernels. For vLLM's `latent`, FLASH_ATTN
is FLASH_ATTN_MLA.

Every backend has an engine in a process of its own for every model, on one card. They take turns in every round, and
ratios are taken within a round, because the host's speed moves a step by some ten percent from minute to minute. The
models have the shapes of Llama 3 8B and of gpt-oss's attention, with random weights (`load_format="dummy"`), and decode
greedily. Engines of a model read the same weights at one place in the card's memory, unless `--weights each`: where
they are moves a product's time by some percent. Time per token is the median of the steps in which every request gets
one; such a run finds its prompts in the cache, those that are timed as prefill are new. With drafts a step may give a
request several tokens, and the median is called ms a step. Where vLLM takes no new names
(before 0.32), WARPATTN is its CUSTOM.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench.engine import process, served_by_sglang
from bench.engine.cases import CASES, MIXED, PREFILLS, Case, case_of, lengths_of
from bench.engine.process import LONGEST, MODELS, Done, Kind, Weights, Work, serve
from bench.measure.arguments import positive, require_card, status
from bench.measure.record import save, start

KINDS = {
    "vllm": Kind(process.engine, process.generate, process.stop, alone=True),
    "sglang": Kind(served_by_sglang.engine, served_by_sglang.generate, served_by_sglang.stop, alone=False),
}
DEFAULTS = {
    "vllm": {"models": "llama,gpt-oss", "backends": "FLASH_ATTN,WARPATTN", "weights": "one"},
    "sglang": {"models": "llama", "backends": "fa3,warpattn", "weights": "each"},
}
RECORDED = ("engine", "rounds", "graphs", "inductor", "captured", "step_tokens", "drafts", "weights")  # options
OF_VLLM = ("profile", "inductor", "captured", "step_tokens", "drafts")  # options
ENDED = "its process has ended"
PROFILED = 12  # tokens of a profiled run
WARM = (*((lengths,) * n for lengths, n in ((600, 128), (300, 3), (2500, 7))), (LONGEST // 2,))


class Engines(NamedTuple):
    """The engines of one model, by backend; the first backend is the peer."""

    model: str
    pipes: dict[str, Any]

    def each(self, work: Work, turn: int = 0) -> dict[str, Done]:
        """What every engine makes of a work, one after the other, every second turn the other way around."""
        found = {name: self.one(name, work) for name in list(self.pipes)[:: 1 if turn % 2 else -1]}
        return {name: found[name] for name in self.pipes}

    def one(self, name: str, work: Work) -> Done:
        try:
            self.pipes[name].send(work)
        except OSError:
            raise RuntimeError(ENDED) from None
        return answer(self.pipes[name])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=KINDS, default="vllm")
    parser.add_argument("--models", help=", ".join(MODELS))
    parser.add_argument("--backends", help="the first one is the peer")
    parser.add_argument("--case", action="append", type=case_of, help="[MODEL ]CASE, one or more; default: all")
    parser.add_argument("--graphs", default="FULL_DECODE_ONLY", help="vLLM's cudagraph_mode; for SGLang, too")
    parser.add_argument("--inductor", action="store_true", help="vLLM compiles the model, as it does by default")
    parser.add_argument("--captured", type=positive, default=128, help="tokens of the largest step in vLLM's graphs")
    parser.add_argument("--step-tokens", type=positive, default=8192, help="most of a step of vLLM's")
    parser.add_argument("--drafts", type=positive, default=0, help="tokens that n-grams draft in a step of vLLM's")
    parser.add_argument("--layers", type=int, default=0, help="instead of the model's")
    parser.add_argument("--tokens", type=positive, default=64, help="new tokens of a request")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--again", type=positive, default=2, help="runs of decoding in a round")
    parser.add_argument("--weights", choices=("one", "each"), help="memory of a model's weights")
    parser.add_argument("--profile", action="append", default=[], type=case_of, help="kernels of a case's decoding")
    parser.add_argument("--cache-gib", type=positive, default=20, help="of keys and values, each engine")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing after that many")
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args()
    fill_in(parser, args)
    require_card(parser, "engines", args.engine)
    begin = time.perf_counter()
    engines = started(args)
    settings = {name: getattr(args, name) for name in RECORDED}
    record = start("bench.engine", sys.argv[1:], settings) | {"cases": {}}
    lines = []
    cases = args.case or [Case(None, case) for case in (*CASES, "mixed")]
    for case, group in [(case.name, group) for case in cases for group in engines if case.of(group.model)]:
        if time.perf_counter() - begin > args.seconds:
            lines.append(f"{group.model:8s} {case:10s}not begun: {args.seconds:.0f} s are over")
            continue
        try:
            found = measured(group, case, args)
        except RuntimeError as error:
            lines.append(f"{group.model:8s} {case:10s}failed: {error}")
            continue
        record["cases"][f"{group.model} {case}"] = found
        lines += lines_of(f"{group.model:8s} {case:10s}", found, list(group.pipes))
        print(lines[-1], f"{time.perf_counter() - begin:.0f} s", flush=True)
        save(record, args.json)
    print("\n".join(lines), flush=True)
    for group in engines:
        for pipe in group.pipes.values():
            with contextlib.suppress(OSError):  # its process has ended
                pipe.send(None)


def fill_in(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """What depends on the engine, where it is not given; an error where that engine has none."""
    for name, value in DEFAULTS[args.engine].items():
        setattr(args, name, getattr(args, name) or value)
    vllm_only = [option for option in OF_VLLM if getattr(args, option) != parser.get_default(option)]
    if args.engine == "sglang" and (args.models != "llama" or args.weights != "each" or vllm_only):
        without = ", ".join(f"--{option.replace('_', '-')}" for option in OF_VLLM)
        parser.error(f"--engine sglang takes --models llama and --weights each, and none of {without}")


def started(args: argparse.Namespace) -> list[Engines]:
    """All engines, started and warmed up side by side; those of a model with one that failed are left out."""
    context, kind = multiprocessing.get_context("spawn"), KINDS[args.engine]
    engines = []
    for model in args.models.split(","):
        group = Engines(model, {})
        names = args.backends.split(",")
        for name, weights in zip(names, weights_of(names, args.weights, context), strict=True):
            group.pipes[name], theirs = context.Pipe()
            work = partial(serve, kind, theirs, model, name, weights, args)
            context.Process(target=status, args=(work,), daemon=kind.alone).start()  # Ctrl-C reaches it, too
            for pipe in (theirs, *weights.give, *filter(None, [weights.take])):
                pipe.close()  # so that one hears if an engine whose answer or weights it waits for has failed
        engines.append(group)
    works = [Work(lengths, f"warm {len(lengths)}", 16) for lengths in WARM]
    up = []
    for group in engines:
        try:
            seconds = {name: round(answer(pipe), 1) for name, pipe in group.pipes.items()}
        except RuntimeError as error:
            print(group.model, "is left out:", error, flush=True)
            continue
        print(group.model, "up after", seconds, flush=True)
        up.append(group)
    for group in up:
        for pipe in group.pipes.values():
            for work in works:
                pipe.send(work)
    for group in up:
        for pipe in group.pipes.values():
            for _ in works:
                answer(pipe)
    return up


def weights_of(names: Sequence[str], memory: str, context: Any) -> list[Weights]:
    """Each engine's weights: the first one's for all of them, or `each` its own."""
    if memory == "each":
        return [Weights() for _ in names]
    pipes = [context.Pipe(duplex=False) for _ in names[1:]]
    return [Weights(give=tuple(give for _, give in pipes)), *(Weights(take=take) for take, _ in pipes)]


def answer(pipe: Any) -> Any:
    """The next one of an engine; RuntimeError where it failed."""
    try:
        found = pipe.recv()
    except (EOFError, ConnectionError):
        raise RuntimeError(ENDED) from None
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


def measured(engines: Engines, case: str, args: argparse.Namespace) -> dict[str, Any]:
    """A case by every engine in turn: medians of the rounds, and those of the ratios to the first one."""
    rounds = [round_of(engines, case, number, args) for number in range(args.rounds)]
    peer, *_ = engines.pipes
    results: dict[str, Any] = {}
    for name in engines.pipes:
        results[name] = {key: statistics.median(one[name][key] for one in rounds) for key in rounds[0][name]}
        results[name]["ratios"] = {
            key: [round(one[name][key] / one[peer][key], 4) for one in rounds] for key in rounds[0][name] if key != SAME
        }
    if any(chosen.name == case and chosen.of(engines.model) for chosen in args.profile):
        work = Work(lengths_of(case), f"{case} 0", PROFILED, profile=True)  # prompts of a round, found in the cache
        for name, done in engines.each(work).items():
            results[name][f"kernels of {PROFILED} tokens"] = [kernel._asdict() for kernel in done.kernels]
            print_profile(f"{engines.model} {case} {name}, {PROFILED} new tokens", done)
    return results


SAME = "same tokens"  # as the peer: share of the requests


def round_of(engines: Engines, case: str, number: int, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """What each engine did in a round, by name of the figure."""
    lengths, seed = lengths_of(case), f"{case} {number}"
    found: dict[str, dict[str, float]] = {name: {} for name in engines.pipes}
    if case == "mixed":
        last = engines.each(Work(lengths, seed, MIXED[-1]), number)
        for name, done in last.items():
            found[name]["tokens/s"] = (sum(lengths) + len(lengths) * MIXED[-1]) / done.seconds
    else:
        for name, done in engines.each(Work(lengths, seed, 1), number).items():
            if case in PREFILLS:
                found[name]["s of prefill"] = done.seconds
        runs = [engines.each(Work(lengths, seed, args.tokens), number + again) for again in range(args.again)]
        for name in found:
            steps = [step for run in runs for step in run[name].steps]
            found[name]["ms a step" if args.drafts else "ms a token"] = statistics.median(steps)
        last = runs[-1]
    expected = next(iter(last.values())).tokens
    for name, done in last.items():
        found[name][SAME] = sum(a == b for a, b in zip(done.tokens, expected, strict=True)) / len(expected)
    return found


def lines_of(title: str, results: dict[str, Any], names: Sequence[str]) -> list[str]:
    """A line for every figure of a case."""
    lines = []
    for key in results[names[0]]["ratios"]:
        shown = "  ".join(f"{name} {results[name][key]:10.4g}" for name in names)
        ratios = [results[name]["ratios"][key] for name in names[1:]]
        others = "  ".join(f"{statistics.median(one):.3f} {one}" for one in ratios)
        lines.append(f"{title}{key:14s}{shown}  ratio {others}  {results[names[-1]][SAME]:.0%} the same tokens")
    return lines


def print_profile(title: str, done: Done) -> None:
    """The kernels that took longest."""
    print(f"{title}:")
    for kernel in done.kernels:
        took, idle = kernel.microseconds / 1000, kernel.idle / 1000
        print(f"  {took:9.3f} ms {idle:8.3f} idle {kernel.times:6d} x {kernel.median:8.2f} us  {kernel.name[:60]}")


if __name__ == "__main__":
    sys.exit(status(main))
