"""`demo --simulate sm90`: runs one real layer's attention by the simulated kernel, without a card.

all-MiniLM-L6-v2 in fp16 on the CPU ─ first layer: q, k, v, padding ─▶ simulated kernel | fp32 reference | sdpa
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import typer
from rich.console import Console
from torch import Tensor

from warpattn.api import attention
from warpattn.cli.progress import working
from warpattn.errors import many
from warpattn.masks import Mask
from warpattn.reference import reference

LIMIT = 3e-3  # fp16 rounds values of this layer, which stay below 3, by at most 1e-3


class Layer(NamedTuple):
    """The arguments of one layer's attention: q, k, v [batch, seq, heads, 32] in fp16, mask, scale."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | None
    scale: float


def simulated_layer(folder: Path, sentences: list[str], arch: str) -> None:
    """Run the layer, print the differences, and exit with 1 if they are too large or the kernel has findings."""
    x = first_layer(folder, sentences)
    console = Console(highlight=False)
    with working(f"compiling and simulating the {arch} kernel"):
        out = attention(x.q, x.k, x.v, mask=x.mask, scale=x.scale, backend=f"simulate:{arch}")
    assert isinstance(out, Tensor)
    expected, _ = reference(x.q, x.k, x.v, mask=x.mask, scale=x.scale)
    heads = f"{x.q.shape[2]} heads of {x.q.shape[3]}"
    console.print(
        f"all-MiniLM-L6-v2, layer 1: {many(len(sentences), 'sentence')} of up to {x.q.shape[1]} tokens, {heads}, fp16"
    )
    difference = float((out.float() - expected).abs().max())
    console.print(f"simulated {arch} kernel against the fp32 reference: largest difference {difference:.2e}")
    console.print(f"values up to {float(expected.abs().max()):.2f}; at most {LIMIT:.0e} expected; no findings")
    if not difference <= LIMIT:
        typer.echo("error: the simulated kernel and the reference disagree", err=True)
        raise typer.Exit(1)


def first_layer(folder: Path, sentences: list[str]) -> Layer:
    """Return the operands of the first layer's attention, with the model's real weights."""
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, AutoTokenizer
    from transformers.utils import logging

    from warpattn.integrations.transformers import attend, build_mask

    seen: list[Layer] = []

    def note(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        q, k, v = (x.detach().transpose(1, 2) for x in (query, key, value))
        scale = options.get("scaling")
        seen.append(Layer(q, k, v, mask, q.shape[-1] ** -0.5 if scale is None else scale))
        return attend(module, query, key, value, mask, **options)

    AttentionInterface.register("warpattn-noted", note)
    AttentionMaskInterface.register("warpattn-noted", build_mask)
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    tokens = tokenizer(sentences, padding=True, truncation=True, max_length=256, return_tensors="pt")
    model = AutoModel.from_pretrained(
        folder, local_files_only=True, attn_implementation="warpattn-noted", dtype=torch.float16
    )
    with torch.inference_mode():
        model.eval()(**tokens)
    return seen[0]
