"""The commands of `python -m warpattn`; their errors print one sentence and exit with status 1."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import torch
import typer
from typer.core import TyperGroup

from warpattn.cli import bench, compile, demo, doctor, plan, run, simulate
from warpattn.cli.progress import shown
from warpattn.cli.serving import cache, tune
from warpattn.errors import AttentionError


class OneSentenceErrors(TyperGroup):
    """A group that prints users' mistakes in one sentence; bugs keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand."""
        try:
            return super().invoke(ctx)
        except AttentionError as error:
            typer.echo(f"error: {error}", err=True)
        except torch.OutOfMemoryError as error:
            typer.echo(f"error: the card has too little memory; {str(error).splitlines()[0]}", err=True)
        sys.exit(1)


app = typer.Typer(
    cls=OneSentenceErrors,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Attention kernels for Hopper, Blackwell and CDNA, and an eager reference for any CPU.",
)


@app.callback()
def options(
    progress: Annotated[
        bool, typer.Option("--progress/--no-progress", help="Show progress on standard error, if it is a terminal")
    ] = True,
) -> None:
    """Options of every command."""
    shown.set(progress)


app.command("demo")(demo.demo)
app.command("run")(run.run)
app.command("plan")(plan.plan_command)
app.command("compile")(compile.compile_command)
app.command("simulate", context_settings={"ignore_unknown_options": True})(simulate.simulate_command)
app.command("doctor")(doctor.doctor)
app.command("bench", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(bench.bench)
app.command("warm")(cache.warm_command)
app.command("tune")(tune.tune_command)
app.add_typer(cache.app, name="cache")
