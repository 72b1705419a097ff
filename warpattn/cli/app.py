"""The commands of `python -m warpattn`, and how their errors end: one sentence, exit status 1."""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from warpattn.cli import bench, compile, demo, doctor, plan, run, simulate
from warpattn.errors import AttentionError


class OneSentenceErrors(TyperGroup):
    """A group that prints what the user got wrong instead of a traceback; bugs keep theirs."""

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand."""
        try:
            return super().invoke(ctx)
        except AttentionError as error:
            typer.echo(f"error: {error}", err=True)
            sys.exit(1)


app = typer.Typer(
    cls=OneSentenceErrors,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Attention kernels for Hopper, Blackwell and CDNA, and an eager reference for any CPU.",
)
app.command("demo")(demo.demo)
app.command("run")(run.run)
app.command("plan")(plan.plan_command)
app.command("compile")(compile.compile_command)
app.command("simulate")(simulate.simulate_command)
app.command("doctor")(doctor.doctor)
app.command(
    "bench", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)(bench.bench)
