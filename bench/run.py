"""Times cases × peers: `python -m bench.run --group d128 --peers warpattn,cudnn,fa4 --rounds 20 --json FILE`.

Every peer's output is compared with fp32 before it is timed, and a wrong one is not timed. The table comes last.
Without --group, --host or --first-call: all that is required on a GPU, the small cases on a CPU.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from bench import correct, first_call, host
from bench.cases import Case, groups
from bench.measure import inputs, record, table, timing, workers
from bench.measure.arguments import status
from bench.measure.progress import bar
from bench.peers import OWN, PEERS, Peer, Unsupported, first_line


@dataclass(frozen=True)
class Settings:
    """How to time: rounds per case, seed of inputs and order, input sets used in turn (more than 1 keeps L2 cold)."""

    rounds: int = 20
    seed: int = 0
    rotate: int = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 if warpattn was wrong or failed, or, with --enforce, missed a requirement; else 0."""
    argv = sys.argv[1:] if argv is None else list(argv)
    args = _arguments(argv)
    settings = Settings(args.rounds, args.seed, args.rotate)
    found = record.start("bench.run", argv, asdict(settings))
    peers = [peer.name for peer in _available(args.peers, found)]
    listed = [(name, case) for name in args.group for case in groups()[name]]
    cases = [(name, case) for name, case in listed if any(part in case.name for part in args.only)]
    with bar(len(cases) + args.host + args.first_call, args.progress) as step:
        for entry in _entries(cases, peers, settings, (args.workers, args.patience)):
            step(entry["case"]["name"])
            found["cases"].append(entry)
            _save(found, args.json)
        found["cases"].sort(key=lambda entry: cases.index((entry["group"], Case(**entry["case"]))))
        if args.host:
            step("host side of one call")
            found["host"] = host.measure(args.seed)
        if args.first_call:
            step("first call in a new process")
            found["first_call"] = first_call.measure()
    _save(found, args.json)
    print(table.render(found), flush=True)
    bad = any(entry["results"].get(OWN, {}).get("status") in ("wrong", "failed") for entry in found["cases"])
    missed = any(verdict["met"] is False for verdict in found["verdicts"])
    return int(bad or (args.enforce and missed))


@dataclass
class Ready:
    """A case whose peers are compiled and checked: results so far, and calls of those to be timed."""

    group: str
    case: Case
    results: dict[str, dict[str, Any]]
    calls: dict[str, list[Callable[[], object]]]


def prepare_case(group: str, case: Case, peers: Sequence[Peer], settings: Settings) -> Ready:
    """Compiles and checks every peer on one case."""
    device = inputs.default_device()
    sets = [inputs.make(case, device, settings.seed + index) for index in range(settings.rotate)]
    want = correct.expected(case, sets[0])
    checked = {peer.name: _check(case, peer, sets, want) for peer in peers}
    calls = {name: calls for name, (_, calls) in checked.items() if calls}
    return Ready(group, case, {name: result for name, (result, _) in checked.items()}, calls)


def time_case(ready: Ready, settings: Settings) -> dict[str, Any]:
    """Times the peers of a case in turn; one entry of the record's `cases`."""
    case, results, samples = ready.case, ready.results, dict[str, timing.Sample]()
    for name, calls in ready.calls.items():
        sample = _sample(calls, results[name])
        if sample is not None:
            samples[name] = sample
    times = timing.interleave(samples, settings.rounds, settings.seed)
    for name, taken in times.items():
        results[name] |= _numbers(case, samples[name], taken, times.get(OWN) if name != OWN else None)
    return {"group": ready.group, "case": case.asdict(), "flops": case.flops(), "results": results}


def _sample(calls: timing.Calls, result: dict[str, Any]) -> timing.Sample | None:
    """The sample of a peer's calls, unless they fail when they are repeated."""
    try:
        return timing.sample(calls, inputs.default_device())
    except Exception as error:
        result |= {"status": "failed", "reason": first_line(error)}
        return None


def run_case(group: str, case: Case, peers: Sequence[Peer], settings: Settings) -> dict[str, Any]:
    """Checks and times every peer on one case; one entry of the record's `cases`."""
    return time_case(prepare_case(group, case, peers, settings), settings)


def _job(group: str, case: Case, peers: Sequence[str], settings: Settings) -> Callable[[], dict[str, Any]]:
    """A job of `workers.run`."""
    return partial(time_case, prepare_case(group, case, [PEERS[name] for name in peers], settings), settings)


def _entries(
    cases: Sequence[tuple[str, Case]], peers: Sequence[str], settings: Settings, processes: tuple[int, float]
) -> Iterator[dict[str, Any]]:
    """Entries of the record's `cases`, as they are done; processes: how many, and their patience."""
    if processes[0] == 1:
        yield from (_job(group, case, peers, settings)() for group, case in cases)
        return
    jobs = [partial(_job, group, case, peers, settings) for group, case in cases]
    for number, entry in workers.run(jobs, *processes):
        group, case = cases[number]
        died = {"status": "failed", "reason": "it was not timed, see standard error", "error": None, "speed": None}
        lost = {"group": group, "case": case.asdict(), "flops": case.flops(), "results": dict.fromkeys(peers, died)}
        yield lost if entry is None else entry


def _check(
    case: Case, peer: Peer, sets: Sequence[inputs.QKV], want: correct.Expected
) -> tuple[dict[str, Any], list[Callable[[], object]]]:
    """The peer's result so far, and its calls if its output is right."""
    result: dict[str, Any] = {"status": "failed", "reason": None, "error": None, "speed": None}
    try:
        calls = [peer.prepare(case, *qkv) for qkv in sets]
        correct.poison(sets[0][0], (case.batch, case.seq_q, case.heads_q, case.dim_v))
        errors, reason = correct.verdict(case, calls[0](), want)
    except Unsupported as error:
        return result | {"status": "unsupported", "reason": str(error)}, []
    except Exception as error:  # a broken peer is a line in the report, not the end of the run
        return result | {"reason": first_line(error)}, []
    result["error"] = asdict(errors) if errors else None
    if reason is not None:
        return result | {"status": "wrong", "reason": reason}, []
    return result | {"status": "timed"}, calls


def _numbers(case: Case, sample: timing.Sample, times: Sequence[float], own: Sequence[float] | None) -> dict[str, Any]:
    """What a timed result has: summary, TFLOP/s, and the paired speed against warpattn if it was timed too."""
    summary = timing.Summary.of(times)
    return {
        "mode": sample.mode,
        "note": sample.note,
        "calls": sample.calls,
        "ms": summary.asdict(),
        "tflops": case.tflops(summary.median),
        "speed": timing.paired_ratio(times, own).asdict() if own else None,
    }


def _available(names: Sequence[str], found: record.Record) -> list[Peer]:
    """The peers that can run here; the reasons of the others go into the record."""
    usable = []
    for name in names:
        reason = PEERS[name].available()
        version = PEERS[name].version() if reason is None else None
        found["peers"][name] = {"available": reason is None, "reason": reason, "version": version}
        if reason is None:
            usable.append(PEERS[name])
    return usable


def _save(found: record.Record, path: Path | None) -> None:
    if path is not None:
        record.write(found, path)
    else:
        found["verdicts"] = record.verdicts(found)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """An argparse type: a comma-separated list of known names, or `all`."""

    def parse(text: str) -> list[str]:
        names = list(known) if text == "all" else text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)} (known: {', '.join(known)}, all)")
        return names

    return parse


class OneSentenceErrors(argparse.ArgumentParser):
    """A parser that ends as every command of warpattn does: one sentence, exit status 1."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong with the arguments."""
        self.exit(1, f"error: {message}; `{self.prog} --help` lists what it takes\n")


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = OneSentenceErrors(prog="python -m bench.run", description=__doc__)
    every = list(PEERS)
    parser.add_argument("--group", type=_names(list(groups())), default=[], help="groups of cases, comma-separated")
    parser.add_argument("--only", nargs="+", default=[""], help="keep only cases whose name contains one of these")
    parser.add_argument("--peers", type=_names(every), default=every, help=f"of {','.join(every)}; default all")
    parser.add_argument("--rounds", type=int, default=20, help="recorded rounds per case")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs and the order within a round")
    parser.add_argument("--rotate", type=int, default=1, help="input sets used in turn; more than 1 keeps L2 cold")
    parser.add_argument("--workers", type=int, default=1, help="processes that compile and check; timing is one by one")
    parser.add_argument("--patience", type=float, default=math.inf, help="seconds in which --workers prepare cases")
    parser.add_argument("--host", action="store_true", help="also measure the host side of one call")
    parser.add_argument("--first-call", action="store_true", help="also measure the first call in new processes")
    parser.add_argument("--json", type=Path, help="write the record here (after every case)")
    parser.add_argument("--enforce", action="store_true", help="exit with 1 if a requirement is not met")
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="no progress on standard error")
    args = parser.parse_args(argv)
    least = min(args.rounds, args.rotate, args.workers)
    if least < 1:
        given = f"--rounds is {args.rounds}, --rotate {args.rotate} and --workers {args.workers}"
        parser.error(f"{given}; all must be at least 1")
    if not (args.group or args.host or args.first_call):
        _everything(args)
    return args


def _everything(args: argparse.Namespace) -> None:
    """What a run without a choice measures: all that is required on a GPU, the small cases on a CPU."""
    on_gpu = torch.cuda.is_available()
    args.group = [name for name in groups() if name != "wide" and (name == "smoke") != on_gpu]
    args.host = args.first_call = on_gpu


if __name__ == "__main__":
    sys.exit(status(main))
