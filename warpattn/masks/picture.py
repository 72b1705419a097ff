"""Draws a mask: one character or square per (query, key), and the spans of every tile of rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warpattn.inputs import kind_of
from warpattn.language.evaluate import evaluate, evaluate_all
from warpattn.language.traced import require, whole
from warpattn.masks.program import MaskProgram

KEPT, HIDDEN = "■", "·"
CELL = 12  # pixels per side


@dataclass(frozen=True)
class Picture:
    """A drawn mask. `text` has one line per query; `svg` also shows the spans: shaded full part, lines at its ends."""

    text: str
    svg: str

    def __str__(self) -> str:
        return self.text

    def _repr_svg_(self) -> str:
        return self.svg


def draw(program: MaskProgram, sizes: tuple[int, int], at: tuple[int, int], tile: int) -> Picture:
    """Draw `program` for sizes = (queries, keys), at = (batch index, head), with spans of tiles of `tile` rows."""
    for name, size, low in (("Sq", sizes[0], 0), ("Sk", sizes[1], 0), ("tile", tile, 1)):
        require(whole(size, low) is not None, f"{name} is {kind_of(size)}", f"it must be an int of at least {low}")
    rows, keys = sizes
    tensors = [tensor.cpu() for tensor in program.tensors]
    shared = {"b": at[0], "h": at[1], "len_q": rows, "len_k": keys}
    row, key = (torch.arange(size, device="cpu") for size in sizes)
    grid = {"q": row[:, None] + (keys - rows), "k": key}
    kept = evaluate(program.keep, shared | grid, tensors).expand(rows, keys).tolist()
    spans = []
    for start in range(0, rows, tile):
        stop = min(start + tile, rows)
        ends = {"q_lo": start + keys - rows, "q_hi": stop - 1 + keys - rows}
        bounds = [int(bound) for bound in evaluate_all(program.span, shared | ends, tensors)]
        spans.append((start, stop, bounds))
    text = "\n".join("".join(KEPT if cell else HIDDEN for cell in row) for row in kept)
    return Picture(text, _svg(kept, spans, sizes))


def _svg(kept: list[list[bool]], spans: list[tuple[int, int, list[int]]], sizes: tuple[int, int]) -> str:
    width, height = sizes[1] * CELL, sizes[0] * CELL
    parts = [f'<rect width="{width}" height="{height}" fill="#f4f4f4"/>']
    for y, row in enumerate(kept):
        for x, cell in enumerate(row):
            if cell:
                box = f'x="{x * CELL + 1}" y="{y * CELL + 1}" width="{CELL - 2}" height="{CELL - 2}"'
                parts.append(f'<rect {box} fill="#3d6fb4"/>')
    for start, stop, (first, full_lo, full_hi, last) in spans:
        y, tall = start * CELL, (stop - start) * CELL
        if full_lo < full_hi:
            box = f'x="{full_lo * CELL}" y="{y}" width="{(full_hi - full_lo) * CELL}" height="{tall}"'
            parts.append(f'<rect {box} fill="#1c2f4d" fill-opacity="0.35"/>')
        if first < last:
            box = f'x="{first * CELL}" y="{y}" width="{(last - first) * CELL}" height="{tall}"'
            parts.append(f'<rect {box} fill="none" stroke="#d1495b" stroke-width="2"/>')
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">\n{body}\n</svg>\n'
