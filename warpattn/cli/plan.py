"""`plan`: shows which kernel a problem gets, with which configuration, and why. Needs no GPU."""

from __future__ import annotations

import textwrap
from typing import Annotated

import typer
from rich.console import Console

from warpattn.cli import spelling
from warpattn.cli.request import Request
from warpattn.runtime.plan import plan
from warpattn.runtime.training.plan import plan_backward


def plan_command(
    shape: Annotated[str, typer.Option(help=spelling.SHAPE_HELP)] = "4x4096x16x128",
    mask: Annotated[str, typer.Option(help=spelling.MASK_HELP)] = spelling.MASK,
    score: Annotated[str, typer.Option(help=spelling.SCORE_HELP)] = "",
    dtype: Annotated[str, typer.Option(help=spelling.OPERAND_HELP)] = "bf16",
    kv_dtype: Annotated[str, typer.Option(help=f"8-bit keys and values: {spelling.STORED_HELP}")] = "",
    arch: Annotated[str, typer.Option(help=f"Architecture: {spelling.ARCH_HELP}")] = "sm90",
    backward: Annotated[bool, typer.Option("--backward", help=spelling.BACKWARD_HELP)] = False,
) -> None:
    """Print the plan of a problem and its reasons."""
    request = Request(shape, mask, score, dtype, backward, kv_dtype)
    chosen = (plan_backward if backward else plan)(request.checked(arch).problem, arch=arch)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    print_plan(console, f"{request}{spelling.default_note(mask)}", chosen)


def print_plan(console: Console, problem: str, chosen: object) -> None:
    """Print a problem and its plan, in lines of the console's width."""
    for line in (problem, *str(chosen).splitlines()):
        console.print(wrapped(line, console.width))


def wrapped(line: str, width: int) -> str:
    """Break a line between words into lines of at most `width` columns, all but the first indented by two more."""
    text = line.lstrip()
    indent = " " * (len(line) - len(text))
    return textwrap.fill(
        text, width, initial_indent=indent, subsequent_indent=indent + "  ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
