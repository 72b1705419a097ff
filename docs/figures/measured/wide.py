"""The wide group's part of docs/benchmarks.md, and its picture: every case against its fastest peer."""

from __future__ import annotations

from typing import Any

from docs.figures.svg import BLUE, GREEN, GREY, ORANGE, RED, box, picture, words

REASONS = """The H100's times are older: they are from before [experiment 266](../bench/notes.md), which made prefill
up to 1.12 times as fast, and at 40 to 224 columns from before P·V had exactly their columns (experiment 261). Head dims
320 and 512 have no peer here: each refused them.
"""
POINTS = 0.03  # of a ratio, by which two cards may differ
COLOURS = {"cudnn": BLUE, "fa3": GREEN, "fa4": ORANGE}


def section(record: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Lines of Markdown: a record, and the ratios of the same cases on another card."""
    peers = [peer for peer in record["cases"][0]["results"] if peer != "warpattn"]
    rows = [(_title(entry["case"]), entry["results"]) for entry in record["cases"]]
    there = {_title(entry["case"]): entry["results"] for entry in other["cases"]}
    lower = sum(
        speed < min(_speeds(results).get(peer, 0.0) - POINTS, 1.0)
        for title, results in rows for peer, speed in _speeds(there[title]).items()
    )  # fmt: skip
    card = other["machine"]["gpu"].split()[1]
    lines = [
        "## Wide: other head dims, groups, lengths, windows, documents",
        "",
        f"`{record['command']}`, {record['date'][:10]}{_again(record)}. bf16 unless fp16 is named; {_behind(rows)} of "
        f"the {sum(bool(_speeds(results)) for _, results in rows)} cases that a peer has are behind the fastest one. "
        "FlashAttention 3 (`fa3`) is the varlen form of its C++ kernels that vLLM ships; documents are sequences of "
        "their own for it, while warpattn reads their bounds from a tensor. – where a peer has no kernel for a case.",
        "",
        f"The last columns are an {card}: `{other['command']}`, {other['date'][:10]}{_again(other)}, "
        f"{_behind(list(there.items()))} cases behind; {lower} ratios are below 1 and more than "
        f"{100 * POINTS:.0f} points below those of the first card.",
        "",
        "![Speed over the fastest peer](figures/measured/wide.svg)",
        "",
        f"| batch × length, heads, head dim | µs | TFLOP/s | {' | '.join(peers)} | {card} TFLOP/s | "
        + " | ".join(f"{card} {peer}" for peer in peers) + " |",
        "|---" * (2 * len(peers) + 4) + "|",
    ]  # fmt: skip
    for title, results in rows:
        own = results["warpattn"]
        time = f"{own['ms']['median'] * 1e3:.1f}" if own["status"] == "timed" else own["status"]
        cells = [title, time, *_cells(results, peers), *_cells(there[title], peers)]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, "", REASONS]


def _again(record: dict[str, Any]) -> str:
    """The commands that timed the cases which the first one did not, or some again."""
    runs = (("others", "the other cases"), ("renewed", "after a change"))
    return "".join(
        f" (`{later['command']}`, {later['date'][:10]}, {why})" for kind, why in runs if (later := record.get(kind))
    )


def _cells(results: dict[str, Any], peers: list[str]) -> list[str]:
    """TFLOP/s, and the speed over each peer."""
    own, speeds = results["warpattn"], _speeds(results)
    reached = f"{own['tflops']:.0f}" if own["status"] == "timed" else "–"
    return [reached, *(f"{speeds[peer]:.2f}×" if peer in speeds else "–" for peer in peers)]


def _behind(rows: list[tuple[str, dict[str, Any]]]) -> int:
    """Cases that are slower than their fastest peer."""
    return sum(min(_speeds(results).values(), default=1.0) < 1 for _, results in rows)


def chart(record: dict[str, Any]) -> str:
    """A bar a case: warpattn's speed over the fastest peer."""
    left, full, top, most = 330, 420, 66, 2.0
    parts = [words(10, 22, "warpattn's speed over the fastest peer of each case", 16)]
    x = 10.0
    for peer, colour in COLOURS.items():
        parts += [box(x, 36, 12, 12, colour), words(x + 18, 46, f"fastest: {peer}", 12)]
        x += 120
    rows = [(_title(entry["case"]), _speeds(entry["results"])) for entry in record["cases"]]
    rows = [(title, speeds) for title, speeds in rows if speeds]
    for i, (title, speeds) in enumerate(rows):
        y, peer = top + 16 * i, min(speeds, key=speeds.__getitem__)
        parts += [words(left - 8, y + 10, title, 11, anchor="end")]
        parts.append(box(left, y, full * min(speeds[peer], most) / most, 12, COLOURS.get(peer, GREY)))
        parts.append(words(left + full * min(speeds[peer], most) / most + 6, y + 10, f"{speeds[peer]:.2f}", 11))
    parts.append(box(left + full / most, top - 6, 1.5, 16 * len(rows) + 8, RED))
    return picture(left + full + 50, top + 16 * len(rows) + 12, parts)


def _speeds(results: dict[str, Any]) -> dict[str, float]:
    """By peer: its time over warpattn's."""
    return {peer: result["speed"]["median"] for peer, result in results.items() if result.get("speed")}


def _title(case: dict[str, Any]) -> str:
    heads = str(case["heads_q"]) if case["heads_q"] == case["heads_kv"] else f"{case['heads_q']}/{case['heads_kv']}"
    dims = str(case["dim"]) if case["dim"] == case["dim_v"] else f"{case['dim']}/{case['dim_v']}"
    length = str(case["seq_q"]) if case["seq_q"] == case["seq_k"] else f"{case['seq_q']} over {case['seq_k']}"
    mask = f"window {case['window']}" if case["window"] else "causal" if case["causal"] else "full"
    extra = f", {case['documents']} documents" if case["documents"] > 1 else ""
    extra += f", soft-cap {case['softcap']:g}" if case["softcap"] else ""
    extra += ", fp16" if case["dtype"] == "float16" else ""
    return f"{case['batch']} × {length}, {heads}, D {dims}, {mask}{extra}"
