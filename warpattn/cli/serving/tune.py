"""`tune`: measures configurations on this machine's card; lists and forgets tuned choices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from warpattn.cli import spelling
from warpattn.cli.progress import working
from warpattn.cli.request import are, given
from warpattn.errors import AttentionError, many
from warpattn.runtime.tuned import rows
from warpattn.serving.call_shape import STEP, CallShape, shapes_of
from warpattn.serving.layers import LargestStep, Layer, layers_of, read_config

SHAPE_HELP = f"A call: {spelling.SHAPE_HELP}; repeatable"
ROUNDS = 15
OF_SHAPE, OF_CONFIG = ("mask", "score", "dtype"), ("requests", "tokens", "length")


def tune_command(
    ctx: typer.Context,
    config: Annotated[
        Path | None, typer.Argument(help="A transformers config: a folder with config.json, or such a file")
    ] = None,
    shape: Annotated[list[str] | None, typer.Option(help=SHAPE_HELP)] = None,
    mask: Annotated[str, typer.Option(help=f"Of --shape: {spelling.MASK_HELP}")] = spelling.MASK,
    score: Annotated[str, typer.Option(help=f"Of --shape: {spelling.SCORE_HELP}")] = "",
    dtype: Annotated[str, typer.Option(help="Of --shape: fp16 or bf16")] = "bf16",
    page_size: Annotated[int, typer.Option(help="Rows of a page; 0: --shape is dense, the config has 16")] = 0,
    requests: Annotated[int, typer.Option(help="Of the config: requests of a step of one token")] = STEP.requests,
    tokens: Annotated[int, typer.Option(help="Of the config: tokens of a prompt")] = STEP.tokens,
    length: Annotated[int, typer.Option(help="Of the config: keys of a request in that step")] = STEP.length,
    rounds: Annotated[int, typer.Option(help="Rounds in which all configurations take turns; medians count")] = ROUNDS,
    processes: Annotated[int, typer.Option(help="Compilers at a time; 0: as many as there are cores")] = 0,
    listed: Annotated[bool, typer.Option("--list", help="Print what was tuned, on all cards")] = False,
    forget: Annotated[bool, typer.Option("--forget", help="Remove what was tuned, on all cards")] = False,
) -> None:
    """Time every configuration of calls on this machine's card; plans of such calls use the fastest from then on."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    _refuse_idle(ctx)
    if listed:
        _list(console)
    elif forget:
        _forget(console)
    else:
        if page_size < 0:
            raise AttentionError(f"page-size is {page_size}; it must be 0 or the rows of a page")
        sizes = {"requests": requests, "tokens": tokens, "length": length}
        calls = [_call(text, mask, score, dtype, page_size) for text in shape or ()]
        if config is not None:
            step = LargestStep(**sizes, page_size=page_size or STEP.page_size)
            calls = shapes_of(layers_of(read_config(config)), step)
        done = [0.0]
        with working("compiling and timing configurations", lambda: done[0]):
            from warpattn.serving.tuning import tune  # imports Triton's processes

            found = tune(calls, rounds=rounds, processes=spelling.processes(processes),
                         progress=lambda part: done.__setitem__(0, part))  # fmt: skip
        for one in found:
            console.print(f"{one.shape}: {one.words}")
            for name, why in one.row.refused.items() if one.row else ():
                console.print(f"  not used: {name}: {why}")


def _refuse_idle(ctx: typer.Context) -> None:
    """Raise AttentionError unless one thing to do is given, and for options that it would ignore."""
    kinds = {"config": "CONFIG", "shape": "--shape", "listed": "--list", "forget": "--forget"}
    chosen = [kind for kind in kinds if ctx.params[kind]]
    if len(chosen) != 1:
        has = are([kinds[kind] for kind in chosen] or ["nothing"])
        raise AttentionError(f"{has} given; tune takes one of CONFIG, --shape, --list and --forget")
    (kind,), others = chosen, ctx.params.keys() - kinds
    idle = {"config": OF_SHAPE, "shape": OF_CONFIG}.get(kind, others)
    for name in ctx.params:
        if name in idle and (option := given(ctx, (name,))):
            rule = "which takes no other option" if idle is others else f"{option[0]} is for the other one of the two"
            together = f"{name.replace('_', '-')} is {ctx.params[name]!r} and {kinds[kind]} is given"
            raise AttentionError(f"{together}{',' if idle is others else ';'} {rule}")


def _call(text: str, mask: str, score: str, dtype: str, page_size: int) -> CallShape:
    """Make the call that options spell."""
    size = spelling.shape(text)
    if dtype not in ("fp16", "bf16"):
        raise AttentionError(f"dtype is {dtype!r}; tune takes fp16 and bf16")
    layer = Layer(size.heads_q, size.heads_kv, size.dim_qk, size.dim_v, spelling.operand(dtype))
    modifiers = spelling.mask(mask), spelling.score(score, size.heads_q)
    return CallShape(layer, size.batch, size.seq_q, size.seq_k, page_size, *modifiers)


def _list(console: Console) -> None:
    """Print every tuned choice, and the file."""
    file = rows.path()
    found = rows.read(file)
    for row in found.values():
        console.print(f"{row.call}: {row.words}")
    console.print(f"{many(len(found), 'tuned choice')} in {file}" if found else "no tuned choices")


def _forget(console: Console) -> None:
    """Remove the file of tuned choices."""
    file = rows.path()
    try:
        count = rows.forget(file)
    except OSError as error:
        raise AttentionError(f"tuned choices in {file} cannot be removed: {error.strerror}") from error
    console.print(f"removed {many(count, 'tuned choice')}" if count else "no tuned choices")
