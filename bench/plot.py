"""Grouped bars of a record: TFLOP/s per shape and peer, one panel per group of cases, as SVG.

`python -m bench.plot RECORD.json OUT.svg`. Needs matplotlib (extra `plot`).
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from bench.cases import Case
from bench.measure import record
from bench.measure.arguments import status
from bench.peers import OWN

OWN_COLOR = "#d1495b"
COLORS = ("#30638e", "#003d5b", "#edae49", "#00798c", "#8d96a3", "#6a4c93")


def plot(found: record.Record, out: Path | TextIO) -> None:
    """Writes the picture; raises ImportError without matplotlib and ValueError if nothing in the record was timed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = _panels(found)
    if not panels:
        raise ValueError("the record has no timed case")
    size = (11, 3.4 * len(panels))
    plain = {"svg.hashsalt": "warpattn", "svg.fonttype": "none", "font.size": 9, "font.sans-serif": ["DejaVu Sans"]}
    with pyplot.rc_context(plain):
        figure, axes = pyplot.subplots(len(panels), 1, figsize=size, squeeze=False, layout="constrained")
        for axis, (title, entries) in zip(axes[:, 0], panels.items(), strict=True):
            _bars(axis, title, entries)
        when = found["date"].split("T")[0]
        figure.suptitle(f"{found['machine']['gpu'] or 'CPU'}, {when}: median TFLOP/s, interleaved; lines: quartiles")
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    text = shortened(drawn.getvalue())
    if isinstance(out, Path):
        out.write_text(text, encoding="utf-8")
    else:
        out.write(text)


def shortened(svg: str) -> str:
    """Return a picture with hundredths of a point as its finest places, and without indentation."""
    return re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", re.sub(r"\n +", "\n", svg))


def _panels(found: record.Record) -> dict[str, list[dict[str, Any]]]:
    """Entries with a timed result, by group."""
    panels: dict[str, list[dict[str, Any]]] = {}
    for entry in found["cases"]:
        if any(result["status"] == "timed" for result in entry["results"].values()):
            panels.setdefault(entry["group"], []).append(entry)
    return panels


def _bars(axis: Any, title: str, entries: Sequence[dict[str, Any]]) -> None:
    """One group of bars per shape, one bar per peer that was timed on any of them."""
    cases = [Case(**entry["case"]) for entry in entries]
    peers = [n for n in entries[0]["results"] if any(e["results"][n]["status"] == "timed" for e in entries)]
    width = 0.8 / len(peers)
    others = iter(COLORS * 2)
    for index, peer in enumerate(peers):
        x, height, spread = [], [], ([], [])
        for position, (case, entry) in enumerate(zip(cases, entries, strict=True)):
            result = entry["results"][peer]
            if result["status"] != "timed":
                continue
            x.append(position + (index - (len(peers) - 1) / 2) * width)
            height.append(result["tflops"])
            spread[0].append(result["tflops"] - case.tflops(result["ms"]["q3"]))
            spread[1].append(case.tflops(result["ms"]["q1"]) - result["tflops"])
        color = OWN_COLOR if peer == OWN else next(others)
        axis.bar(x, height, width, yerr=spread, label=peer, color=color, error_kw={"elinewidth": 0.6})
    axis.set_xticks(range(len(cases)), [case.shape() for case in cases])
    axis.set_ylabel("TFLOP/s")
    case = cases[0]
    heads = f"{case.heads_q}" if case.heads_q == case.heads_kv else f"{case.heads_q}/{case.heads_kv}"
    axis.set_title(f"{title}: heads {heads}, D {case.dim}, {case.dtype}", loc="left")
    axis.legend(ncols=len(peers), loc="upper left", frameon=False, fontsize=8)
    axis.margins(y=0.2)
    axis.spines[["top", "right"]].set_visible(False)


def main(argv: Sequence[str]) -> int:
    """`RECORD.json OUT.svg`."""
    if len(argv) != 2:
        print("usage: python -m bench.plot RECORD.json OUT.svg", file=sys.stderr)
        return 2
    plot(record.read(Path(argv[0])), Path(argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(status(partial(main, sys.argv[1:])))
