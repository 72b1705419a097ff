"""Draws the masks of docs/masks.md (`make docs`). Each figure is a mask's own picture: it cannot show anything else."""

from pathlib import Path

import torch

from warpattn import masks

HERE = Path(__file__).parent
IDS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2])

FIGURES = {
    "causal": masks.Causal(),
    "window": masks.SlidingWindow(5),
    "two-sided-window": masks.SlidingWindow(4, right=3),
    "chunked": masks.Chunked(6) & masks.Causal(),
    "prefix": masks.Prefix(5),
    "document": masks.Document(IDS) & masks.Causal(),
    "sinks-and-window": masks.SlidingWindow(4) | (masks.CustomMask(lambda b, h, q, k: k < 2) & masks.Causal()),
    "not": ~masks.SlidingWindow(4, right=3),
}


def files() -> dict[Path, str]:
    """One SVG per mask, 16 queries by 16 keys, spans of tiles of 4 rows."""
    return {HERE / f"{name}.svg": mask.picture(16, 16, tile=4).svg for name, mask in FIGURES.items()}
