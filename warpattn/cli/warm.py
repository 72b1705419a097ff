"""`warm`: compile what a model's attention needs, in parallel, before an engine starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from warpattn.cli.progress import working
from warpattn.serving.layers import LargestStep, layers_of, read_config


def warm_command(
    config: Annotated[Path, typer.Argument(help="A transformers config: a folder with config.json, or such a file")],
    arch: Annotated[str, typer.Option(help="Architecture; that of the card in this machine if not given")] = "",
    requests: Annotated[int, typer.Option(help="Requests of a step, at most")] = 256,
    tokens: Annotated[int, typer.Option(help="New tokens of a step, at most")] = 8192,
    length: Annotated[int, typer.Option(help="Tokens of a request with its context, at most")] = 32768,
    page_size: Annotated[int, typer.Option(help="Rows of a page of the cache")] = 16,
    drafts: Annotated[int, typer.Option(help="Tokens that speculation drafts for a request")] = 0,
    processes: Annotated[int, typer.Option(help="Compilers at a time; 0: as many as there are cores")] = 0,
) -> None:
    """Compile the kernels that a model's attention needs, so that serving it compiles nothing."""
    largest = LargestStep(requests, tokens, length, page_size, drafts)
    layers = layers_of(read_config(config))
    done = [0.0]
    with working("compiling kernels", lambda: done[0]):
        from warpattn.serving.warming import warm  # imports Triton's processes

        found = warm(layers, largest, arch=arch or None, processes=processes or None,
                     progress=lambda part: done.__setitem__(0, part))  # fmt: skip
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for layer in layers:
        window = f", window {layer.window}" if layer.window else ""
        dims = f"{layer.dim_qk}/{layer.dim_v}"
        console.print(f"layer  {layer.heads_q}/{layer.heads_kv} heads, head dims {dims}{window}")
    console.print(f"{found.kernels} kernels, {found.compiled} compiled now")
