"""Is the configuration that the plan of a dense prefill chooses the best one? `python -m bench.choices --shapes 30`

Draws shapes that no rule was made for, tries every configuration of Hopper's prefill kernel that fits (tiles, rings,
packed heads, keys in parts), and prints the best time over that of the plan's choice. A card is needed; kernels are
compiled by `--workers` processes, without it, before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.cases import Case, find
from bench.measure import inputs, record, timing
from bench.measure.arguments import positive, require_card, status
from bench.measure.workers import compiled
from bench.peers.adapter import first_line
from warpattn.kernels.sm90.candidates import candidates, described
from warpattn.kernels.sm90.prefill.choice import choose
from warpattn.kernels.sm90.prefill.launch import list_launches
from warpattn.masks import Causal, SlidingWindow
from warpattn.problem import Call, CheckedCall, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.launch import Choice, Launch
from warpattn.problem.operands import Operands, fitted
from warpattn.runtime import compiler, kernel_cache
from warpattn.runtime.tuned.timer import GraphLaunches
from warpattn.sequences import Dense

CHOSEN = "chosen"
DIMS = ((64, 64), (64, 64), (80, 80), (96, 96), (128, 128), (128, 128), (128, 128), (192, 128), (256, 256))
HEADS = ((8, 8), (12, 12), (16, 16), (32, 8), (40, 8), (28, 4), (64, 8), (16, 2))
LARGEST_ERROR = 0.05


class Drawn(NamedTuple):
    """What random shapes are drawn from."""

    dims: Sequence[tuple[int, int]] = DIMS
    longest: int = 2**15  # keys
    flops: float = 5e11  # of a shape with a batch above 1, at most: about a millisecond


USUAL = Drawn()


def shapes(count: int, seed: int, drawn: Drawn = USUAL) -> Iterator[Case]:
    """Cases with lengths that are no powers of two, more than decode takes."""
    draw = random.Random(seed)
    for number in range(count):
        dim, dim_v = draw.choice(drawn.dims)
        heads, heads_kv = draw.choice(HEADS)
        kind = draw.choice(("causal", "causal", "causal", "full", "window"))
        keys = int(2 ** draw.uniform(6.5, math.log2(drawn.longest)))
        queries = keys if draw.random() < 0.7 else int(2 ** draw.uniform(5, keys.bit_length() - 1))
        window = draw.choice((128, 1024)) if kind == "window" else None
        case = Case(
            f"{number}", 1, queries, keys, heads, heads_kv, dim, dim_v, causal=kind != "full", window=window
        )
        batch = max(1, int(draw.random() * min(64, drawn.flops / case.flops(), 65536 / keys)))
        name = f"{batch}x{queries}/{keys} {heads}/{heads_kv} D{dim}/{dim_v} {kind}{window or ''}"
        yield replace(case, name=name, batch=batch)


def checked(case: Case, qkv: inputs.QKV) -> CheckedCall:
    """The call of a case on tensors of the card, or on the CPU to compile it for one."""
    mask = SlidingWindow(case.window) if case.window else Causal() if case.causal else None
    backend = "auto" if qkv[0].is_cuda else "simulate:sm90"
    return validate(Call(*qkv, Dense(), mask, None, None, None, False, None, backend))


def empty(case: Case) -> inputs.QKV:
    """q, k and v that take no memory."""
    one = torch.empty(1, dtype=getattr(torch, case.dtype))
    q = one.expand(case.batch, case.seq_q, case.heads_q, case.dim)
    k, v = (one.expand(case.batch, case.seq_k, case.heads_kv, dim) for dim in (case.dim, case.dim_v))
    return q, k, v


def choices(case: Case, tile: str = "") -> dict[str, Choice]:
    """The plan's choice and all others whose names contain `tile`, by what they are."""
    problem, target = checked(case, empty(case)).problem, ARCHS["sm90"]
    chosen = choose(problem, target)
    others = {name: x for name, x in candidates(problem, target).items() if tile in name}
    return {CHOSEN: chosen} | {name: x for name, x in others.items() if name != described(chosen)}


def launches(case: Case, choice: Choice, qkv: inputs.QKV) -> tuple[tuple[Launch, ...], torch.Tensor]:
    """Of a choice, and their output."""
    q, k, v = qkv
    out = torch.empty(*q.shape[:-1], case.dim_v, dtype=q.dtype, device=q.device if q.is_cuda else "meta")
    operands = Operands(q, k, v, out, None, None)
    return list_launches(checked(case, qkv), fitted(operands) if q.is_cuda else operands, Dense(), choice), out


def compile_one(case: Case, name: str) -> None:
    """Fill the disk cache."""
    for launch in launches(case, choices(case)[name], empty(case))[0]:
        kernel_cache.find((launch.name, launch.arch, launch.key), partial(compiler.artifact_of, launch))


def compile_all(cases: Sequence[Case], tile: str, workers: int) -> None:
    """Every kernel once, however many shapes want it."""
    jobs = {}
    for case in cases:
        for name, choice in choices(case, tile).items():
            jobs.setdefault((choice.config, checked(case, empty(case)).problem.mask), (case, name))
    print(f"{len(jobs)} kernels of {len(cases)} shapes", flush=True)
    for done in compiled([(compile_one, *job) for job in jobs.values()], workers):
        if error := done.exception():
            print(first_line(error), flush=True)


def measured(case: Case, tile: str, rounds: int) -> dict[str, Any]:
    """The times of `choices`; those that fail or differ from the plan's output are named."""
    samples: dict[str, timing.Sample] = {}
    wrong, want, qkv = {}, None, inputs.make(case, torch.device("cuda"), 0)
    made_choices = choices(case, tile)
    for name, choice in made_choices.items():
        try:
            made, out = launches(case, choice, qkv)
            bound = GraphLaunches(made, 0)
            bound.launch()
            want = out.clone() if want is None else want
            error = (out.float() - want.float()).abs().max().item()
            if not error <= LARGEST_ERROR:
                wrong[name] = f"differs by {error}"
                continue
            samples[name] = timing.sample([bound.launch], torch.device("cuda"))
        except Exception as error:
            wrong[name] = first_line(error)
    taken = timing.interleave(samples, rounds, 0, warm_ms=60)
    times = {name: timing.Summary.of(values).median * 1000 for name, values in taken.items()}
    best = min(times, key=times.__getitem__)
    return {
        "case": case.brief(), "chosen": described(made_choices[CHOSEN]), "best": best,
        "speed": timing.paired_ratio(taken[best], taken[CHOSEN]).median, "microseconds": times, "wrong": wrong,
    }  # fmt: skip


def read_records(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Records of this command, without shapes that a later one has measured again, with newer kernels. A later record
    of `--tile` brings newer times of that tile for the shapes of the records before it."""
    found: list[dict[str, Any]] = []
    for one in (json.loads(path.read_text()) for path in paths):
        tile, again = one["settings"].get("tile", ""), {entry["case"]["name"]: entry for entry in one["cases"]}
        for other in found:
            others = [entry for entry in other["cases"] if tile or entry["case"]["name"] not in again]
            other["cases"] = [renewed(entry, again.get(entry["case"]["name"]), tile) for entry in others]
        if not tile:
            found.append(one)
    return found


def renewed(entry: dict[str, Any], newer: dict[str, Any] | None, tile: str) -> dict[str, Any]:
    """An entry with the times of a tile that a newer one has, as they would be on the card of the entry: that card's
    time of the newer choice tells, unless that choice has the tile, too."""
    if newer is None:
        return entry
    times, new = named_times(entry), named_times(newer)
    chosen = newer["chosen"]
    scale = times[chosen] / new[chosen] if chosen in times and tile not in chosen else 1.0
    times |= {name: time * scale for name, time in new.items() if tile in name}
    times = {CHOSEN: times.pop(entry["chosen"])} | times
    best = min(times, key=times.__getitem__)
    return entry | {"best": best, "speed": times[best] / times[CHOSEN], "microseconds": times}


def named_times(entry: dict[str, Any]) -> dict[str, float]:
    """The microseconds of an entry, by what the configurations are."""
    times = dict(entry["microseconds"])
    times[entry["chosen"]] = times.pop(CHOSEN)
    return times


def shapes_of(path: Path) -> list[Case]:
    """The shapes of a record."""
    return [Case(**entry["case"]) for entry in json.loads(path.read_text())["cases"]]


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, time, print; a JSON record with --json."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="python -m bench.choices", description=__doc__)
    parser.add_argument("--shapes", type=int, default=0, help="how many are drawn")
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="of the shapes; so many of each")
    parser.add_argument("--dim", type=int, action="append", help="a head dim to draw from, repeatable")
    parser.add_argument("--longest", type=positive, default=USUAL.longest, help="most keys of a drawn shape")
    parser.add_argument("--flops", type=float, default=USUAL.flops, help="most of a drawn batch of several sequences")
    parser.add_argument("--case", action="append", default=[], help="a case of bench.cases, or of --again, repeatable")
    parser.add_argument("--again", type=Path, nargs="+", default=[], help="records whose shapes are timed again")
    parser.add_argument("--tile", default="", help="time only the choice and configurations with this in their names")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    drawn = Drawn(DIMS if args.dim is None else [(dim, dim) for dim in args.dim], args.longest, args.flops)
    again = list({case.name: case for record in args.again for case in shapes_of(record)}.values())
    cases = [case for case in again if not args.case or case.name in args.case] if again else [*map(find, args.case)]
    cases += [case for seed in args.seed for case in shapes(args.shapes, seed, drawn)]
    cases = [case for case in cases if args.tile in " ".join(map(described, choices(case, args.tile).values()))]
    if not cases:
        parser.error("there is nothing to time: give --shapes, --case or --again")
    require_card(parser, "choices")
    found = record.start("bench.choices", argv, {"rounds": args.rounds, "seed": args.seed, "tile": args.tile})
    compile_all(cases, args.tile, args.workers)
    for case in cases:
        entry = measured(case, args.tile, args.rounds)
        found["cases"].append(entry)
        us = entry["microseconds"]
        print(
            f"{entry['speed']:.3f} {case.name}: {us[CHOSEN]:.1f} us {entry['chosen']}; "
            f"best {us[entry['best']]:.1f} {entry['best']}", *entry["wrong"].items(), flush=True,
        )  # fmt: skip
        record.save(found, args.json)
    speeds = sorted(entry["speed"] for entry in found["cases"])
    print(f"best time over the choice's: least {speeds[0]:.3f}, {sum(x < 0.93 for x in speeds)} below 0.93", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(status(main))
