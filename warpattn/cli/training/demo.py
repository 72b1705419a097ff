"""`demo --train`: fine-tunes the demo's sentence model twice on real text, with stock attention and with warpattn.

The text is this package's own docstrings: a sentence should be closer to the one after it than to those after the
others of its batch (InfoNCE, arXiv 1807.03748). Weights, order and optimizer are the same, so the losses must be, too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from warpattn.cli import tensors
from warpattn.cli.progress import working
from warpattn.errors import AttentionError, many

PACKAGE = Path(__file__).parents[2]
BATCH, BATCHES = 8, 4  # pairs of a step, and steps until the text begins again, so that the loss falls
RATE = 5e-5
TEMPERATURE = 0.05
# Largest allowed difference of the losses of a step: the rounding of six layers, grown over the steps before.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
WORDS = (6, 40)  # of a sentence
ROWS = 9  # of the text plot


class Run(NamedTuple):
    """How to train."""

    device: torch.device
    dtype: torch.dtype
    steps: int
    plot: Path | None


class Curves(NamedTuple):
    """The loss of every step, for each attention."""

    stock: list[float]
    ours: list[float]

    @property
    def difference(self) -> float:
        """The largest difference of any step; NaN if there is one."""
        return float((torch.tensor(self.stock) - torch.tensor(self.ours)).abs().max())


def train_both(folder: Path, run: Run) -> None:
    """Train with both, print plot and table, and exit with 1 if the losses differ by more than the tolerance."""
    if run.steps < 1:
        raise AttentionError(f"steps is {run.steps}; it must be at least 1")
    if run.plot is not None:
        if run.plot.suffix != ".svg":
            raise AttentionError(f"plot is {str(run.plot)!r}; write a name that ends with .svg")
        tensors.check_writable(run.plot)
    pairs = sentence_pairs(BATCHES * BATCH)
    found = []
    for name in ("sdpa", "warpattn"):
        with working(f"training with {name}"):
            found.append(losses(folder, pairs, name, run))
    curves, console = Curves(*found), Console(highlight=False)
    what = f"{many(run.steps, 'step')} of {BATCH} pairs of sentences, {run.dtype} on {run.device}"
    console.print(f"all-MiniLM-L6-v2, fine-tuned on this package's documentation: {what}\n")
    console.print(text_plot(curves))
    console.print(table(curves))
    limit = TOLERANCE[run.dtype]
    console.print(f"\nlargest difference of the losses  {curves.difference:.2e}  (at most {limit:.0e} expected)")
    if run.plot is not None:
        run.plot.write_text(svg(curves))
        console.print(f"wrote {run.plot}")
    if not curves.difference <= limit:  # NaN, too
        typer.echo("error: training with stock attention and with warpattn disagree", err=True)
        raise typer.Exit(1)


def sentence_pairs(count: int) -> list[tuple[str, str]]:
    """Return `count` sentences of the package's docstrings, each with the one after it."""
    pairs = [pair for path in sorted(PACKAGE.rglob("*.py")) for pair in _pairs(path.read_text())]
    return [pairs[(7 * i) % len(pairs)] for i in range(count)]  # neighbours in a batch are of different modules


def _pairs(source: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(source)):
        text = ast.get_docstring(node) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) else None
        prose = " ".join(part for part in (text or "").split("\n\n") if not part.startswith(" "))
        listed = [s for s in re.split(r"(?<=[.!?])\s+", " ".join(prose.split())) if _is_sentence(s)]
        yield from pairwise(listed)


def _is_sentence(text: str) -> bool:
    low, high = WORDS
    return low <= len(text.split()) <= high and text[0].isupper() and text.isascii()


def losses(folder: Path, pairs: list[tuple[str, str]], attention: str, run: Run) -> list[float]:
    """Train with one attention; return the loss of every step."""
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    from warpattn.integrations.transformers import register

    register()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    without_dropout = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    model = AutoModel.from_pretrained(
        folder, local_files_only=True, attn_implementation=attention, dtype=run.dtype, **without_dropout
    )
    model = model.to(run.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    found = []
    for step in range(run.steps):
        start = step % BATCHES * BATCH
        batch = pairs[start : start + BATCH]
        first, second = (embedded(model, tokenizer, list(side)) for side in zip(*batch, strict=True))
        target = torch.arange(len(batch), device=run.device)
        loss = torch.nn.functional.cross_entropy(first @ second.T / TEMPERATURE, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def embedded(model: torch.nn.Module, tokenizer: Any, sentences: list[str]) -> Tensor:
    """Embed as unit vectors [sentences, 384] in fp32: the mean of the last layer over the real tokens."""
    device = next(model.parameters()).device
    tokens = tokenizer(sentences, padding=True, truncation=True, max_length=128, return_tensors="pt").to(device)
    weight = tokens["attention_mask"][..., None].float()
    mean = (model(**tokens).last_hidden_state.float() * weight).sum(1) / weight.sum(1)
    return torch.nn.functional.normalize(mean, dim=1)


def table(curves: Curves) -> Table:
    """Make a table of at most twelve steps, with the first and the last."""
    made = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("step", "sdpa", "warpattn", "difference"):
        made.add_column(name, justify="right")
    last = len(curves.stock) - 1
    for step in sorted({round(i * last / 11) for i in range(12)}):
        a, b = curves.stock[step], curves.ours[step]
        made.add_row(str(step + 1), f"{a:.5f}", f"{b:.5f}", f"{abs(a - b):.1e}")
    return made


def text_plot(curves: Curves) -> str:
    """Plot loss over steps as text: ● both, ○ only stock attention, × only warpattn."""
    low, high = min(map(min, curves)), max(map(max, curves))
    span = max(high - low, 1e-12)

    def row(loss: float) -> int:
        return round((high - loss) / span * (ROWS - 1)) if loss == loss else ROWS - 1

    lines = []
    for number in range(ROWS):
        marks = []
        for a, b in zip(*curves, strict=True):
            here = (row(a) == number, row(b) == number)
            marks.append({(True, True): "●", (True, False): "○", (False, True): "×"}.get(here, " "))
        lines.append(f"{high - span * number / (ROWS - 1):7.3f} │{''.join(marks)}")
    return "\n".join([*lines, f"        └{'─' * len(curves.stock)} steps   ● both, ○ sdpa alone, × warpattn alone", ""])


def svg(curves: Curves) -> str:
    """Draw both curves as one picture."""
    low, high = min(map(min, curves)), max(map(max, curves))
    span, wide = max(high - low, 1e-12), max(len(curves.stock) - 1, 1)

    def points(losses: list[float]) -> str:
        return " ".join(f"{50 + 540 * i / wide:.1f},{20 + 240 * (high - x) / span:.1f}" for i, x in enumerate(losses))

    line = '<polyline fill="none" stroke-width="{}" stroke="{}" points="{}"/>'
    ends = f'<text x="6" y="24">{high:.3f}</text><text x="6" y="264">{low:.3f}</text>'
    names = '<text x="60" y="290" fill="#c77d2e">stock attention</text>'
    names += '<text x="200" y="290" fill="#3d6fb4">warpattn</text>'
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 610 300" font-family="sans-serif" font-size="12">',
            '<rect width="610" height="300" fill="white"/>',
            line.format(5, "#c77d2e", points(curves.stock)),
            line.format(2, "#3d6fb4", points(curves.ours)),
            ends + names,
            "</svg>",
            "",
        ]
    )
