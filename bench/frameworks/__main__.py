"""transformers, diffusers and SGLang with warpattn beside their own attention, as a user calls them.

    python -m bench.frameworks --json record.json
    python -m bench.frameworks --only transformers --case prefill --rounds 3
    python -m bench.frameworks --smoke                     # tiny sizes on the CPU

Models have the shapes of real ones with fewer layers and random weights in bf16, made on the card. Implementations of a
case run in one process and take turns in every round, in shuffled order; ratios are taken within a round. Every result
is compared first, with fp32 where that is at hand; a wrong one is not timed. A framework that is not installed, and an
implementation that cannot run a case, say why.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.frameworks.timing import Group, line_of, measured
from bench.measure.arguments import positive, status
from bench.measure.record import Record, save, start
from bench.peers.adapter import first_line

MODULES = {
    "transformers": "bench.frameworks.language_models",
    "diffusers": "bench.frameworks.diffusion_models",
    "sglang": "bench.frameworks.sglang_backends",
}


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    args = parsed(argv)
    device = torch.device("cpu" if args.smoke else "cuda")
    given = list(sys.argv[1:] if argv is None else argv)
    settings = {"rounds": args.rounds, "seed": args.seed, "smoke": args.smoke}
    record = start("bench.frameworks", given, settings) | {"cases": {}, "left_out": {}}
    begin = time.perf_counter()

    def over() -> bool:
        return time.perf_counter() - begin > args.seconds

    for framework in args.only:
        try:
            groups = groups_of(framework, args.smoke)
        except Exception as problem:  # the other frameworks still run
            record["left_out"][framework] = first_line(problem)
            print(f"{framework} is left out: {first_line(problem)}", flush=True)
            continue
        for group in groups:
            run(group, args, device, record, over)
            print(f"{time.perf_counter() - begin:.0f} s", flush=True)
    save(record, args.json)
    return 0


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(prog="python -m bench.frameworks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(MODULES), help="some of them, with commas")
    parser.add_argument("--case", action="append", default=[], help="cases whose name contains it; default: all")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--seed", type=int, default=0, help="of the order within a round")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after that many")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU, by the reference")
    parser.add_argument("--json", type=Path, help="write the record here (after every case)")
    args = parser.parse_args(argv)
    args.only = args.only.split(",")
    for name in args.only:
        if name not in MODULES:
            parser.error(f"--only has {name}; it takes {', '.join(MODULES)}")
    return args


def groups_of(framework: str, smoke: bool) -> list[Group]:
    """A framework's cases; ImportError where it is not installed, RuntimeError without a card."""
    if importlib.util.find_spec(framework) is None:
        raise ImportError(f"{framework} is not installed")
    if not smoke and not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA GPU; --smoke runs tiny sizes on the CPU")
    return importlib.import_module(MODULES[framework]).groups(smoke)


def run(
    group: Group, args: argparse.Namespace, device: torch.device, record: Record, over: Callable[[], bool]
) -> None:
    """Adds the cases of a model to the record, each as soon as it is done."""
    names = {f"{group.framework}: {group.title}: {case}": make for case, make in group.cases.items()}
    chosen = {name: make for name, make in names.items() if not args.case or any(part in name for part in args.case)}
    model: Any = None
    for name, make in chosen.items():
        if over():
            print(f"{name}: not begun, {args.seconds:.0f} s are over", flush=True)
            continue
        try:
            model = group.build() if model is None else model
            case = make(model)
            entry = measured(case, device, args.rounds, args.seed)
        except Exception as problem:  # the other cases still run
            record["left_out"][name] = first_line(problem)
            print(f"{name}: failed: {first_line(problem)}", flush=True)
        else:
            record["cases"][name] = {"tokens": case.tokens, "results": entry}
            print(line_of(name, entry, case.tokens), flush=True)
            del case
        save(record, args.json)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(status(main))
