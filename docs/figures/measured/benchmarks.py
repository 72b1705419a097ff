"""Writes docs/benchmarks.md and its picture from records in bench/results (`make docs`); no number is typed."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from bench.cases import groups
from bench.measure.record import verdicts
from docs.figures.measured import wide
from docs.figures.svg import BLUE, GREEN, GREY, ORANGE, RED, box, dot, picture, words

HERE = Path(__file__).parent
DOCS = HERE.parents[1]
RECORDS = DOCS.parent / "bench" / "results" / "h200"
CYCLES, ACTIVE = "sm__cycles_elapsed.max", "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
NAMES = {
    "times": "2026-11-30.json",
    "host": "2026-11-28.json",
    "times h100": "../h100/2026-11-27.json",
    "counters": "2026-11-21-ncu.json",
    "decode": "2026-11-28-decode.json",
    "flash": "2026-11-21-decode-fa4.json",
    "ragged": "2026-11-21-ragged.json",
    "wide": "2026-11-30-wide.json",
    "wide h100": "../h100/2026-11-27-wide.json",
}
RENEWED = {
    "wide": "2026-11-30-wide-half-tiles.json",
    "wide h100": "../h100/2026-11-27-wide-40.json",
}  # cases that were timed again
OTHERS = {"wide": "2026-11-30-wide-others.json"}  # cases that another run timed

INTRODUCTION = """# Benchmarks

Every number on this page was written by `docs/figures/measured/benchmarks.py` from the records in `bench/results/`; how
they are measured is described in [bench/README.md](../bench/README.md), and what led to them in
[bench/notes.md](../bench/notes.md). TFLOP/s count 4·B·H·S²·D operations, half of them if causal, the visible pairs with
a window. × is warpattn's speed over the peer's: the median of the ratios of rounds in which both were timed, so above 1
means that warpattn is faster.
"""

LATER = (
    "They are older than [experiment 266](../bench/notes.md), which made prefill up to 1.12 times as fast (head dim "
    "128, long rows); full attention of long rows at head dim 256 is behind flash-attn-4 there."
)

DECODE = """What the numbers do not show by themselves:

- Cards differ, by up to 5 % in these ratios: on another H200 four large dense batches took 0.98 to 0.99 of cuDNN's
  speed that take 1.00 to 1.01 here ([bench/notes.md](../bench/notes.md)).
- A settled cache is a promise about the preceding kernel ([decode on Hopper](kernels/sm90.md)). Launches then
  overlap, which is how one can take less time than a kernel that only reads.
- Latent attention (`mla`) with 128 heads reads each latent twice, for two tiles of 64 rows; 128 × 4k stays 3 % behind
  FlashInfer's faster kernel.
"""

HOST = """A step of a `DecodePlan` costs 9 to 12 µs on the host and allocates nothing, `append_paged` 11 to 14 µs
(`python -m bench.host`, 2026-11-22, five runs on three machines). In a sixth, on a machine that was slow then,
they cost 15.5 and 17.5 µs, and cuDNN's call 28 µs right after.
"""


def records() -> dict[str, dict[str, Any]]:
    """The records that the page is made of."""
    found = {kind: json.loads((RECORDS / name).read_text()) for kind, name in NAMES.items()}
    for kind, name in OTHERS.items():
        found[kind] = _with_others(found[kind], json.loads((RECORDS / name).read_text()))
    for kind, name in RENEWED.items():
        found[kind] = _renewed(found[kind], json.loads((RECORDS / name).read_text()))
    return found


def _renewed(record: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """A record with the cases of a later one of the same card in place of its own, and that one as "renewed"."""
    assert record["machine"]["gpu"] == later["machine"]["gpu"]
    again = {entry["case"]["name"]: entry for entry in later["cases"]}
    cases = [again.get(entry["case"]["name"], entry) for entry in record["cases"]]
    return record | {"cases": cases, "renewed": later}


def _with_others(record: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """A record and the cases that only a later one of the same card has, in their usual order, and that as "others"."""
    assert record["machine"]["gpu"] == later["machine"]["gpu"]
    both = {entry["case"]["name"]: entry for entry in later["cases"] + record["cases"]}
    order = [case.name for group in groups().values() for case in group]
    return record | {"cases": [both[name] for name in order if name in both], "others": later}


def page(found: dict[str, dict[str, Any]]) -> str:
    """The whole page, as Markdown."""
    times, counters = found["times"], found["counters"]
    machine, versions = times["machine"], times["versions"]
    stack = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    lines = [
        INTRODUCTION,
        f"{machine['gpu']} ({machine['power_limit']} limit, driver {machine['driver']}), {stack}, bf16.",
        "",
    ]
    other = found["times h100"]
    there = {entry["case"]["name"]: entry["results"] for entry in other["cases"]}
    lines += ["![TFLOP/s per shape](figures/measured/benchmarks.svg)", "", _source(times), ""]
    lines += [f"The last columns are an H100: {_source(other)} {LATER}", ""]
    for group in dict.fromkeys(entry["group"] for entry in times["cases"]):
        lines += _group(group, [entry for entry in times["cases"] if entry["group"] == group], there)
    lines += wide.section(found["wide"], found["wide h100"]) + _decode(found) + _ragged(found["ragged"])
    met = verdicts(times) + verdicts(found["host"] | {"cases": []}) + verdicts(found["wide"])
    lines += _host(found["host"]) + _requirements(met) + _cycles(counters)
    return "\n".join(lines) + "\n"


def _source(record: dict[str, Any]) -> str:
    return f"`{record['command']}`, {record['date'][:10]}."


def _group(group: str, entries: list[dict[str, Any]], there: dict[str, dict[str, Any]]) -> list[str]:
    """The table of a group; `there`: by case, the results of another card."""
    peers = [peer for peer in entries[0]["results"] if peer != "warpattn"]
    first = entries[0]["case"]
    heads = f"{first['heads_q']}/{first['heads_kv']} heads, head dim {first['dim']}"
    columns = ["warpattn", *peers]
    columns += [f"H100 {name}" for name in columns]
    lines = [
        f"## {group}: {heads}",
        "",
        f"| batch × length | {' | '.join(columns)} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for entry in entries:
        case = entry["case"]
        mask = f"window {case['window']}" if case["window"] else "causal" if case["causal"] else "full"
        cells = [f"{case['batch']} × {case['seq_q']} {mask}"]
        for results in (entry["results"], there[case["name"]]):
            cells += [f"{results['warpattn']['tflops']:.0f}", *(_peer(results[peer]) for peer in peers)]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def _peer(result: dict[str, Any]) -> str:
    if result["status"] != "timed":
        return result["status"]
    return f"{result['tflops']:.0f} ({result['speed']['median']:.2f}×)"


def _decode(found: dict[str, dict[str, Any]]) -> list[str]:
    """Peers of two records; warpattn's times are those of the first."""
    first, flash = found["decode"], found["flash"]
    peers = ("warpattn:settled=1", "read", "cudnn", "flashinfer", "flashinfer-tc")
    columns = [*((first, peer) for peer in peers), (flash, "fa4")]
    lines = [
        "## Decode: one token",
        "",
        f"{_source(first)} For `fa4` {_source(flash)} D 128, bytes of K and V per second; layers take turns, with keys "
        "and values of their own, 1 to 2.4 GiB in all, one table and one plan. `mixed64` and `skewed64` are 64 "
        "sequences with lengths after Zipf's law, from 32 Ki down to 512 and to 1; `mla` is latent attention, 576/512, "
        "whose latents are read once. A peer's × is its time over warpattn's in its own run; that of `fa4` was on "
        "another H200, with earlier code and 0.25 to 2 GiB of inputs in turn. `warpattn:settled=1` is a `DecodePlan` "
        "with `kv_ready_before_dependency`, which latent attention ignores. `read` only reads the keys and values, in "
        "tiles like warpattn's. `-tc` is FlashInfer's kernel with tensor cores (of latent attention its fa3 kernel, "
        "the other one fa2).",
        "",
        "![TB/s of each case of decode](figures/measured/decode.svg)",
        "",
        "| pages, batch × length, heads | µs | TB/s | " + " | ".join(peer for _, peer in columns) + " |",
        "|---" * (len(columns) + 3) + "|",
    ]
    cases = [({entry["case"]["name"]: entry["results"] for entry in record["cases"]}, peer) for record, peer in columns]
    for entry in first["cases"]:
        name, own = entry["case"]["name"], entry["results"]["warpattn"]
        speeds = [results.get(name, {}).get(peer, {}).get("speed") for results, peer in cases]
        cells = [f"{speed['median']:.2f}×" if speed else "–" for speed in speeds]
        cells = [name, f"{own['ms']['median'] * 1e3:.1f}", f"{own['tb_s']:.2f}", *cells]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, "", DECODE]


def _ragged(found: dict[str, Any]) -> list[str]:
    ways = list(dict.fromkeys(way for entry in found["cases"] for way in entry["results"] if way != "dense"))
    lines = [
        "## Ragged and paged prefill",
        "",
        f"{_source(found)} Causal, 16 heads, D 128, 16 k tokens; TFLOP/s, and × those of the dense kernel on the same "
        "work: the same tensors where all sequences are equally long, else sequences of one length with as many keys a "
        "token on average.",
        "",
        "| sequences | dense | " + " | ".join(ways) + " |",
        "|---" * (len(ways) + 2) + "|",
    ]
    for entry in found["cases"]:
        results = entry["results"]
        dense = results["dense"]["tflops"]
        cells = [f"{entry['case']['name']} ({len(entry['case']['lengths'])})", f"{dense:.0f}"]
        for way in ways:
            own = results.get(way)
            cells.append(f"{own['tflops']:.0f} ({own['tflops'] / dense:.2f}×)" if own else "–")
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def _host(times: dict[str, Any]) -> list[str]:
    host, first = times["host"], times["first_call"]
    return [
        "## Host",
        "",
        f"One planned call costs {host['warpattn_us']:.1f} µs on the host, torch's cuDNN SDPA "
        f"{host['cudnn_us']:.1f} µs ({host['ratio']:.2f}×). "
        f"The first call of a process takes {first['cold_s']:.1f} s when the kernel has to be "
        f"compiled and {first['warm_s'] * 1e3:.0f} ms when the disk cache has it.",
        "",
        HOST,
    ]


def _requirements(judged: list[dict[str, Any]]) -> list[str]:
    lines = ["## Requirements", "", "| requirement | met on | worst |", "|---|---|---|"]
    measured = [v for v in judged if v["measured"] is not None]
    for key in dict.fromkeys((v["group"], v["requirement"]) for v in measured):
        rows = [v for v in measured if (v["group"], v["requirement"]) == key]
        met = [v["met"] if v["met"] is not None else v["aim_met"] for v in rows]
        worst = (min if rows[0]["sense"] == ">=" else max)(rows, key=lambda v: v["measured"])
        aim = " (aim)" if rows[0]["must"] is None else ""
        lines.append(f"| {key[0]}: {key[1]}{aim} | {sum(met)} of {len(rows)} | {worst['measured']:.3f} |")
    return [*lines, ""]


def _cycles(counters: dict[str, Any]) -> list[str]:
    rows = [row for row in counters["ncu"] if "metrics" in row]
    peers = [peer for peer in dict.fromkeys(row["peer"] for row in rows) if peer != "warpattn"]
    found = {(row["case"], row["peer"]): row["metrics"] for row in rows}
    lines = [
        "## SM cycles",
        "",
        f"One call under Nsight Compute; cycles do not move with the card's clock: {_source(counters)} "
        "A peer's × is its cycles over warpattn's; the second figure is how much of them the tensor pipe was active.",
        "",
        "| case | warpattn | " + " | ".join(peers) + " |",
        "|---" * (len(peers) + 2) + "|",
    ]
    for case in dict.fromkeys(row["case"] for row in rows):
        own = found[case, "warpattn"]
        cells = [f"{own[CYCLES]:,.0f}, {own[ACTIVE]:.0f} %"]
        for peer in peers:
            theirs = found.get((case, peer))
            cells.append(f"{theirs[CYCLES] / own[CYCLES]:.2f}×, {theirs[ACTIVE]:.0f} %" if theirs else "–")
        lines.append("| " + " | ".join([case, *cells]) + " |")
    return lines


def decode_chart(found: dict[str, Any]) -> str:
    """A row per case of decode, a dot per peer: TB/s of keys and values."""
    left, full, top = 190, 560, 70
    peers = {"read": GREY, "flashinfer": ORANGE, "cudnn": BLUE, "warpattn": RED, "warpattn:settled=1": GREEN}
    titles = {"read": "reading alone", "flashinfer": "FlashInfer, its faster kernel", "cudnn": "cuDNN"}
    titles["warpattn:settled=1"] = "warpattn, settled cache"
    parts, most = [words(10, 22, "Decode, one token: TB/s of keys and values read", 16)], 5.0
    x = 10
    for peer, colour in peers.items():
        title = titles.get(peer, peer)
        parts += [dot(x + 6, 42, colour), words(x + 16, 46, title, 12)]
        x += 34 + 7 * len(title)
    bottom = top + 22 * len(found["cases"])
    for tick in range(int(most) + 1):
        at = left + full * tick / most
        parts.append(box(at, top - 8, 1, bottom - top + 4, "#e4e4e4"))
        parts.append(words(at, bottom + 12, str(tick), 12, anchor="middle"))
    for i, entry in enumerate(found["cases"]):
        y, results = top + 22 * i + 6, faster(entry["results"])
        parts.append(words(left - 12, y + 4, entry["case"]["name"], 12, anchor="end"))
        timed = {peer: results[peer] for peer in peers if results.get(peer, {}).get("status") == "timed"}
        parts += [dot(left + full * result["tb_s"] / most, y, peers[peer]) for peer, result in timed.items()]
    return picture(left + full + 30, bottom + 24, parts)


def faster(results: dict[str, Any]) -> dict[str, Any]:
    """The same with the faster of FlashInfer's two kernels under its name."""
    both = [results[name] for name in ("flashinfer", "flashinfer-tc") if name in results]
    timed = [result for result in both if result["status"] == "timed"]
    return results | ({"flashinfer": min(timed, key=lambda result: result["ms"]["median"])} if timed else {})


def files() -> dict[Path, str]:
    """The page and its pictures."""
    from bench.plot import plot

    found, bars = records(), io.StringIO()
    plot(found["times"], bars)
    return {
        DOCS / "benchmarks.md": page(found),
        HERE / "benchmarks.svg": bars.getvalue(),
        HERE / "decode.svg": decode_chart(found["decode"]),
        HERE / "wide.svg": wide.chart(found["wide"]),
    }
