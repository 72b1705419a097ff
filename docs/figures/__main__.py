"""Draws every figure of docs/ and writes what pages take from records: `python -m docs.figures`, part of `make docs`.

    python -m docs.figures timelines.ring distributed      some of them

Each module here has `files()`: {path: text} of what it makes. A test holds the committed files against the same
functions, so whatever changes a figure (a kernel's lines, the cost model, a record) makes it fail until this has run.
"""

from __future__ import annotations

import argparse
import importlib
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
DRAWN = {
    "masks.masks": "pictures of the masks",
    "concepts": "the way of a call, tiles of a window",
    "measured.benchmarks": "the benchmark page and its charts, from the records",
    "measured.engine": "the README's first chart and the rows of vLLM's and SGLang's pages, from the records",
    "measured.frameworks": "what the pages of transformers, diffusers and SGLang say of speed, from the records",
    "measured.speed": "the README's chart and rows, from the records",
    "distributed": "pictures of ranks, chart and table from the record of two cards",
    "measured.ladder": "the ladder's page and chart, from the records",
    "timelines.ring": "a ring of two slots",
    "timelines.extend": "the product of docs/extend.md",
    "timelines.sm90": "prefill on Hopper",
    "timelines.sm100": "prefill on Blackwell",
    "timelines.cdna": "three buffers on CDNA, and their tables",
}


def files(name: str) -> dict[Path, str]:
    """What one module makes."""
    return importlib.import_module(f"docs.figures.{name}").files()


def main(names: list[str]) -> None:
    """Write the files of the named modules, and say what is done and what has changed."""
    for i, name in enumerate(names, 1):
        print(f"[{i}/{len(names)}] {DRAWN[name]} ...", end=" ", flush=True)
        start, changed = time.perf_counter(), []
        for path, text in files(name).items():
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                path.write_text(text, encoding="utf-8")
                changed.append(str(path.relative_to(ROOT)))
        print(f"{time.perf_counter() - start:.1f} s, {', '.join(changed) or 'nothing'} changed", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser("docs.figures", description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="*", help=f"some of {', '.join(DRAWN)}; all by default")
    given = parser.parse_args().name
    for unknown in [name for name in given if name not in DRAWN]:
        parser.error(f"{unknown} is no figure: {', '.join(DRAWN)} are")
    main(given or list(DRAWN))
