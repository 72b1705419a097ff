"""The wide group's part of docs/benchmarks.md, and its picture: every case against its fastest peer."""

from __future__ import annotations

from typing import Any

from docs.figures.svg import BLUE, GREEN, GREY, ORANGE, RED, box, picture, words

REASONS = """Why some are behind (what was tried: [bench/notes.md](../bench/notes.md), from experiment 117 on):

- *Head dims 72, 80, 96, full*: 192 rows and three warpgroups hide exponentials better. Since this record they have
  them: a warpgroup's two products wait for each other, so that 160 registers hold 128 keys. That takes 0.92 × the time
  of this record's tile at 80 and 0.95 × at 96, each pair in one run on an H200 (experiment 189). By these ratios it
  makes 0.98 of flash-attn-4's speed, which was not in that run.
- *40* was padded to 64 columns, in flash-attn-4 to 48. Since this record it has 32 + 16: 310.2 instead of 323.4 µs
  causal, 529.5 instead of 529.0 full (48 columns beside 40, experiment 190).
- *Head dim 64 with 64/8 heads*: registers spilled by masked tiles. Since this record they do not, and at 2 × 4k and
  8 × 2k the plan packs 8 heads into a tile: the best of all tiles at 20 × 2322 with 16/2 heads (experiment 191); the
  rows of this table were not measured again.
- *192 full, 192/128 at 16 k, 33 k full*: 1 to 4 %; the peers' key tiles are larger (up to 176 keys).
- *1 k over 16 k, 2 k over 32 k*: 256 and 512 nearly equal tiles for 132 SMs; keys in parts would not end sooner.
- *64 × 256, 128 × 128*: tiles of one or two key tiles. At head dim 128 the bytes of 64 × 256 alone take 61 of 80 µs.
  Since this record other tiles and another order take 52.5 instead of 59.4 µs (64 × 256 full), 90.5 instead of 104.8
  (128 × 128) and 74.9 instead of 78.3 (64 × 256 causal), each pair in one run on an H200, without peers
  (experiments 164, 165).
- *Documents at head dim 128*: the mask is tested in tiles at a document's end, with two numbers a query from memory;
  the peer gets the lengths, as `attention_varlen` is.
- *Chosen differently since this record*, and not timed beside peers again: 64 × 577 and 64 × 256 at D 64, 16 × 512,
  128 × 128, 256 × 64 and 64 × 256 at D 128, 4 × 64 over 8192, 8 × 2048 and 2 × 4096 with 64/8 heads at D 64, 2 × 4096
  with 8/1 heads at D 256 (again as it was timed since), 2 × 8192 window 128 with 32/8 heads, 32 × 729 at D 72, and
  4 × 4096 at D 40 and, full, 72 to 96. All other rows have the tiles that they were timed with.
- *Soft-cap at head dim 256*: two special functions a score, and 64 keys a tile.
- *Faster since this record*: warpgroups run one copy of their loop, and their waits have no barrier. By a script on
  one H100 (2026-11-27, 13 rounds in turn, experiment 215) flash-attn-4 takes 1.01, 1.01 and 1.12 × as long as we do at
  96, 80 and 72 full, 1.08 and 1.09 × at 40 and 96 causal, 1.11 × at 2 × 4096 with 64/8 heads at D 64, 1.04 × at
  192/128, 1.00 × at 1k over 16k; 0.98 × at 1 × 33792 full and at 1 × 16384 of 192/128.
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
        f"`{record['command']}`, {record['date'][:10]}. bf16 unless fp16 is named; {_behind(rows)} of {len(rows)} "
        "cases are behind their fastest peer. FlashAttention 3 (`fa3`) is the varlen form of its C++ kernels that vLLM "
        "ships; documents are sequences of their own for it, while warpattn reads their bounds from a tensor. – where "
        "a peer has no kernel for a case.",
        "",
        f"The last columns are an {card}: `{other['command']}`, {other['date'][:10]}, {_behind(list(there.items()))} "
        f"cases behind; {lower} ratios are below 1 and more than {100 * POINTS:.0f} points below those of the first "
        "card.",
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
