"""`cache`: the folder of compiled kernels: what it holds, and emptying it."""

from __future__ import annotations

import time

import typer
from rich.console import Console

from warpattn.errors import AttentionError
from warpattn.runtime import cache_folder

UNIT = 2**20

app = typer.Typer(no_args_is_help=True, help="Compiled kernels on disk: what there is, and emptying it.")


@app.command("info")
def info() -> None:
    """Say where compiled kernels are kept, how many, how large they are, and the limit."""
    place = cache_folder.folder()
    if place is None:
        raise AttentionError("there is no home folder; set WARPATTN_CACHE_DIR to keep compiled kernels")
    held, most = cache_folder.look(place), cache_folder.limit()
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"folder   {place}{'' if place.is_dir() else ' (not made yet)'}")
    if refusal := cache_folder.refusal(place):
        console.print(f"not used: {refusal}")
    console.print(f"kernels  {held.kernels}, {held.size / UNIT:.1f} MiB")
    console.print(f"limit    {most / UNIT:.0f} MiB, those used longest ago leave first; WARPATTN_CACHE_MIB changes it")
    if held.kernels:
        console.print(f"used     from {_day(held.first_use)} to {_day(held.last_use)}")
    if held.unfinished:
        console.print(f"unfinished files  {held.unfinished}")


@app.command("clear")
def clear() -> None:
    """Remove every compiled kernel; what another process is writing stays."""
    place = cache_folder.folder()
    held = cache_folder.look(place)
    removed = cache_folder.clear(place)
    left = cache_folder.look(place)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"removed {removed} kernels, {(held.size - left.size) / UNIT:.1f} MiB, from {place}")
    if left.kernels:
        raise AttentionError(f"{left.kernels} kernels in {place} cannot be removed; this user may not write there")


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(seconds))
