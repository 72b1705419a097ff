"""`bench`: runs the benchmarks, which are in the repository (bench/), not in the wheel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from warpattn.cli.progress import shown
from warpattn.cli.spelling import STORED_HELP, stored
from warpattn.errors import AttentionError

REPOSITORY = Path(__file__).parents[2]


def bench(
    ctx: typer.Context,
    group: Annotated[str, typer.Option(help="Groups of cases, comma-separated; else what this machine can")] = "",
    only: Annotated[str, typer.Option(help="Keep only cases whose name contains this")] = "",
    peers: Annotated[str, typer.Option(help="Peers, comma-separated, e.g. warpattn,cudnn,fa4; default all")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Recorded rounds per case")] = 20,
    json: Annotated[Path | None, typer.Option(help="Write the record here, after every case")] = None,
    host: Annotated[bool, typer.Option("--host", help="Also measure the host side of one call")] = False,
    backward: Annotated[
        bool, typer.Option("--backward", help="Gradients, by `python -m bench.backward`, which has options of its own")
    ] = False,
    kv_dtype: Annotated[
        str, typer.Option(help=f"8-bit keys and values beside 16 bits, by `python -m bench.eight_bit`: {STORED_HELP}")
    ] = "",
    enforce: Annotated[bool, typer.Option("--enforce", help="Exit with 1 if a requirement is not met")] = False,
) -> None:
    """Time warpattn and its peers, every output compared with fp32 first. Other options go to `python -m bench.run`."""
    if not (REPOSITORY / "bench" / "run.py").is_file():
        raise AttentionError("bench is part of the repository, not of the wheel; run this in a clone of warpattn")
    texts = {"--group": group, "--only": only, "--peers": peers, "--rounds": rounds, "--json": json and json.resolve()}
    flags = {"--host": host, "--enforce": enforce, "--no-progress": not shown.get()}
    if backward and any((group, host, enforce)):
        raise AttentionError("--backward goes with --only, --peers, --rounds and --json; leave out other options")
    if stored(kv_dtype) is not None:
        if any((group, peers, host, enforce, backward)):
            raise AttentionError("--kv-dtype goes with --only, --rounds and --json; leave out other options")
        texts["--kv-dtype"] = kv_dtype
    if backward or kv_dtype:
        del flags["--no-progress"]
    arguments = [part for name, value in texts.items() if value for part in (name, str(value))]
    arguments += [*(name for name, given in flags.items() if given), *ctx.args]
    module = "bench.backward" if backward else "bench.eight_bit" if kv_dtype else "bench.run"
    # In a new process, so that timed code does not share an interpreter with this command line's imports.
    done = subprocess.run([sys.executable, "-m", module, *arguments], cwd=REPOSITORY, check=False)
    raise typer.Exit(done.returncode)
