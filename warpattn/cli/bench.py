"""`bench`: the benchmarks, which live beside the package in the repository (bench/), not in the wheel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import typer

REPOSITORY = Path(__file__).parents[2]


def bench(ctx: typer.Context) -> None:
    """Time warpattn and its peers; takes the arguments of `python -m bench.run` (try --help)."""
    if not (REPOSITORY / "bench" / "run.py").is_file():
        typer.echo(
            "error: the benchmarks are part of the repository, not of the wheel: run this in a clone of warpattn",
            err=True,
        )
        raise typer.Exit(2)
    # In a process of its own: what it times must not share an interpreter with this command line's imports.
    raise typer.Exit(
        subprocess.run([sys.executable, "-m", "bench.run", *ctx.args], cwd=REPOSITORY, check=False).returncode
    )
