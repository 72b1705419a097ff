"""Draws the pictures of docs/concepts.md (`make docs`): the way of a call, and the key tiles of a masked tile of rows.

The second one is computed from a mask's own span and in the kernels' own order (masked tiles first), so it cannot show
anything else than what runs.
"""

from __future__ import annotations

from pathlib import Path

import torch

from docs.figures.svg import BLUE, DARK, GREEN, GREY, ORANGE, PALE, arrow, box, picture, words
from warpattn import masks
from warpattn.language.evaluate import evaluate_all

HERE = Path(__file__).parent
TILE, QUERIES, KEYS, CELL = 8, 32, 64, 9  # rows and keys of a tile, sizes, pixels per key
MASK = masks.SlidingWindow(28)


def call_picture() -> str:
    """From tensors and values to what runs."""
    stages = [
        ("q, k, v", "tensors"),
        ("validate", "every rule"),
        ("problem", "no tensors"),
        ("plan", "kernel, config, why"),
        ("kernel", "on a card"),
    ]
    parts = []
    for i, (name, note) in enumerate(stages):
        x = 10 + i * 150
        parts += [box(x, 60, 120, 46, PALE, BLUE), words(x + 60, 82, name, 15, anchor="middle")]
        parts.append(words(x + 60, 98, note, 11, GREY, "middle"))
        parts += [arrow(x + 122, 83, x + 148, 83)] if i + 1 < len(stages) else []
    for i, name in enumerate(("mask", "score", "sinks", "sequence")):
        parts += [words(70 + i * 62, 24, name, 12, DARK, "middle")]
    parts += [arrow(168, 32, 205, 56), words(215, 47, "traced once", 11, GREY)]
    for i, (name, note) in enumerate((("reference", "any device"), ("simulator", "any CPU"))):
        x = 310 + i * 300
        parts += [box(x, 150, 120, 46, PALE, GREEN), words(x + 60, 172, name, 15, anchor="middle")]
        parts.append(words(x + 60, 188, note, 11, GREY, "middle"))
    parts += [arrow(370, 108, 370, 148), arrow(520, 108, 620, 152)]
    return picture(740, 210, parts)


def spans() -> list[list[int]]:
    """[first, full_lo, full_hi, last] of every tile of rows."""
    program, found = MASK.program(), []
    for start in range(0, QUERIES, TILE):
        ends = {"q_lo": start + KEYS - QUERIES, "q_hi": start + TILE - 1 + KEYS - QUERIES}
        at = {"b": 0, "h": 0, "len_q": QUERIES, "len_k": KEYS, **ends}
        found.append([int(bound) for bound in evaluate_all(program.span, at, list(program.tensors))])
    return found


def order(span: list[int]) -> tuple[list[int], list[int]]:
    """(masked key tiles, full key tiles) of a tile of rows, in the order of `warpattn/kernels/pieces/span.py`."""
    first, full_lo, full_hi, last = span
    begin, end = first // TILE, -(-last // TILE)
    lo, hi = max(-(-full_lo // TILE), begin), min(full_hi // TILE, end)
    lo, hi = (lo, hi) if lo < hi else (begin, begin)
    return [*range(end - 1, hi - 1, -1), *range(lo - 1, begin - 1, -1)], [*range(hi - 1, lo - 1, -1)]


def tiles_picture() -> str:
    """Which key tiles are left out, tested element by element, and taken as they are."""
    left, top = 80, 30
    q, k = torch.arange(QUERIES)[:, None] + KEYS - QUERIES, torch.arange(KEYS)
    kept = (k <= q) & (k > q - MASK.window)
    parts = [words(left, 20, f"{KEYS} keys, tiles of {TILE}", 12, GREY)]
    parts += [box(left, top, KEYS * CELL, QUERIES * CELL)]
    for number, span in enumerate(spans()):
        y = top + number * TILE * CELL
        parts.append(
            words(left - 8, y + 4.5 * CELL, f"rows {number * TILE}-{number * TILE + TILE - 1}", 11, GREY, "end")
        )
        masked, full = order(span)
        for place, tile in enumerate(masked + full, 1):
            x, side = left + tile * TILE * CELL, TILE * CELL
            parts.append(box(x + 1, y + 1, side - 2, side - 2, BLUE if tile in full else ORANGE))
            parts.append(_hidden_cells(kept, number, tile, x, y))
            parts.append(
                words(x + side / 2, y + side / 2 + 6, str(place), 17, "white" if tile in full else DARK, "middle")
            )
    y = top + QUERIES * CELL + 22
    for i, (fill, text) in enumerate(
        ((BLUE, "full: no test"), (ORANGE, "masked: each score is tested"), (PALE, "never loaded"))
    ):
        parts += [box(left + i * 200, y - 11, 14, 14, fill, GREY), words(left + 20 + i * 200, y, text, 12)]
    return picture(left + KEYS * CELL + 20, y + 12, parts)


def _hidden_cells(kept: torch.Tensor, row_tile: int, key_tile: int, x: int, y: int) -> str:
    rows, side = kept[row_tile * TILE :][:TILE, key_tile * TILE :][:, :TILE].tolist(), CELL - 2
    cells = "".join(
        f"M{x + i * CELL + 1} {y + j * CELL + 1}h{side}v{side}h-{side}z"
        for j, row in enumerate(rows)
        for i, seen in enumerate(row)
        if not seen
    )
    return f'<path fill="#f6dfb4" d="{cells}"/>'


def files() -> dict[Path, str]:
    """Both pictures."""
    return {HERE / "concepts-call.svg": call_picture(), HERE / "concepts-tiles.svg": tiles_picture()}
