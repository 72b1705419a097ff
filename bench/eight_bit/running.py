"""The command line of a benchmark of named cases: runs those that `--only` names, writes the record, prints it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.measure import arguments, record

RunCase = Callable[[int, int], dict[str, Any]]  # of rounds and seed; an entry of the record's `cases`


def run_cases(
    module: str,
    description: str | None,
    argv: Sequence[str] | None,
    cases: Mapping[str, RunCase],
    render: Callable[[record.Record], str],
) -> int:
    """`python -m module argv…`; 1 if a result was wrong."""
    argv = sys.argv[1:] if argv is None else list(argv)
    args = arguments.timed_cases(module, description).parse_args(argv)
    found = record.start(module, argv, {"rounds": args.rounds, "seed": args.seed})
    for name, run in cases.items():
        if args.only in name:
            found["cases"].append(run(args.rounds, args.seed))
            if args.json is not None:
                record.write(found, args.json)
    print(render(found), flush=True)
    return int(any(r["status"] != "timed" for entry in found["cases"] for r in entry["results"].values()))
