"""`cache` and `warm`: show or empty the folder of compiled kernels, or fill it before serving."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from warpattn.cli import spelling
from warpattn.cli.progress import working
from warpattn.errors import AttentionError, many
from warpattn.runtime import cache_folder
from warpattn.runtime.tuned import rows
from warpattn.serving.layers import EightBitCache, LargestStep, layers_of, read_config, with_cache

UNIT = 2**20

app = typer.Typer(no_args_is_help=True, help="Compiled kernels on disk: what there is, and emptying it.")


@app.command("info")
def info() -> None:
    """Say where compiled kernels are kept, how many, how large they are, and the limit."""
    place = _folder()
    held, most = cache_folder.look(place), cache_folder.limit()
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"folder   {place}{'' if cache_folder.is_folder(place) else ' (not made yet)'}")
    if refusal := cache_folder.refusal(place):
        console.print(f"not used: {refusal}")
    console.print(f"kernels  {held.kernels}, {held.size / UNIT:.1f} MiB")
    console.print(f"limit    {most / UNIT:.0f} MiB, those used longest ago leave first; WARPATTN_CACHE_MIB changes it")
    if held.kernels:
        console.print(f"used     from {_day(held.first_use)} to {_day(held.last_use)}")
    if tuned := rows.read(rows.path()):
        console.print(f"tuned    {many(len(tuned), 'choice')}; `tune --list` prints them, `tune --forget` removes them")
    if held.unfinished:
        console.print(f"unfinished files  {held.unfinished}")


@app.command("clear")
def clear() -> None:
    """Remove every compiled kernel; what another process is writing stays."""
    place = _folder()
    held = cache_folder.look(place)
    removed = cache_folder.clear(place)
    left = cache_folder.look(place)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"removed {many(removed, 'kernel')}, {(held.size - left.size) / UNIT:.1f} MiB, from {place}")
    if left.kernels:
        kept = many(left.kernels, "kernel")
        raise AttentionError(f"{kept} in {place} cannot be removed; this user may not write there")


def _folder() -> Path:
    """Return the folder of compiled kernels; raises AttentionError if there is none."""
    place = cache_folder.folder()
    if place is None:
        raise AttentionError("there is no home folder; set WARPATTN_CACHE_DIR to keep compiled kernels")
    return place


def warm_command(
    config: Annotated[Path, typer.Argument(help="A transformers config: a folder with config.json, or such a file")],
    arch: Annotated[str, typer.Option(help="Architecture; that of the card in this machine if not given")] = "",
    requests: Annotated[int, typer.Option(help="Requests of a step, at most")] = 256,
    tokens: Annotated[int, typer.Option(help="New tokens of a step, at most")] = 8192,
    length: Annotated[int, typer.Option(help="Tokens of a request with its context, at most")] = 32768,
    page_size: Annotated[int, typer.Option(help="Rows of a page of the cache")] = 16,
    drafts: Annotated[int, typer.Option(help="Tokens that speculation drafts for a request")] = 0,
    calls: Annotated[str, typer.Option(help="all, or engine: those of the plug-ins for engines alone")] = "all",
    kv_dtype: Annotated[str, typer.Option(help=f"A cache of 8 bits: {spelling.STORED_HELP}")] = "",
    kv_scales: Annotated[str, typer.Option(help=f"What its scales belong to: {spelling.SCALES_HELP}")] = "",
    processes: Annotated[int, typer.Option(help="Compilers at a time; 0: as many as cores, or a few more")] = 0,
) -> None:
    """Compile the kernels that a model's attention needs, so that serving it compiles nothing."""
    largest = LargestStep(requests, tokens, length, page_size, drafts)
    layers, stored = layers_of(read_config(config)), spelling.stored(kv_dtype)
    if stored is None and kv_scales:
        raise AttentionError(f"--kv-scales is {kv_scales!r}; it belongs to a cache of 8 bits, --kv-dtype")
    if stored is not None:
        layers = with_cache(layers, EightBitCache(stored, spelling.scales(kv_scales or "tensor")))
    done = [0.0]
    with working("compiling kernels", lambda: done[0]):
        from warpattn.serving.warming import warm  # imports Triton's processes

        found = warm(layers, largest, calls=calls, arch=arch or None, processes=spelling.processes(processes),
                     progress=lambda part: done.__setitem__(0, part))  # fmt: skip
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for layer in layers:
        window = f", window {layer.window}" if layer.window else ""
        dims = f"{layer.dim_qk}/{layer.dim_v}"
        held = f", cache {str(layer.cache.dtype).removeprefix('torch.')}" if layer.cache else ""
        console.print(f"layer  {layer.heads_q}/{layer.heads_kv} heads, head dims {dims}{window}{held}")
    console.print(f"{many(found.kernels, 'kernel')}, {found.compiled} compiled now")


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(seconds))
