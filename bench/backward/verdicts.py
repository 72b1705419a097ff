"""What the speeds of gradients must be, and whether a record of `bench.backward` shows them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.measure.record import Record

OWN = "warpattn"
EACH = {"cudnn": 1.15, "fa4": 1.0}  # head dims 64 and 128, full and causal
BETTER = {"cudnn": 1.0, "fa4": 1.0}
DETERMINISTIC = 1.15  # times the time
WINDOW = 0.20  # of the causal time
PACKED = 0.85  # of the TFLOP/s of equal lengths
FLEX = {"alibi": 1.0, "both": 1.5}
HOST = 1.2  # times cuDNN's


def verdicts(record: Record) -> list[dict[str, Any]]:
    """One entry for every requirement that the record touches."""
    timed = {entry["case"]["name"]: entry for entry in record["cases"]}
    found = [verdict for entry in timed.values() for verdict in _of_case(entry)]
    found += _of_pairs(timed)
    if record["host"] and "ratio" in record["host"]:
        found.append(_verdict(f"host side ≤ {HOST} × cudnn", "host", record["host"]["ratio"], at_most=HOST))
    return found


def _of_case(entry: dict[str, Any]) -> Iterator[dict[str, Any]]:
    case, results = entry["case"], entry["results"]
    name = case["name"]
    plain = not (case["window"] or case["lengths"] or case["alibi"])
    if plain:
        usual = case["dim"] in (64, 128) and case["heads_kv"] is None and case["softcap"] is None
        for peer, must in (EACH if usual else BETTER).items():
            if speed := _speed(results, peer):
                yield _verdict(f"speed ≥ {must} × {peer}", name, speed, at_least=must)
    flex = FLEX["both" if case["both"] else "alibi"]
    if case["alibi"] and (speed := _speed(results, "flex")):
        yield _verdict(f"speed ≥ {flex} × flex", name, speed, at_least=flex)
    if taken := _speed(results, "deterministic"):
        yield _verdict(f"deterministic ≤ {DETERMINISTIC} × the time", name, taken, at_most=DETERMINISTIC)


def _of_pairs(timed: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for name, entry in timed.items():
        if entry["case"]["window"]:
            causal = timed.get(name.replace(f"window-{entry['case']['window']}", "causal"))
            if (mine := _number(entry, "ms")) and causal and (whole := _number(causal, "ms")):
                yield _verdict(f"time ≤ {WINDOW} × causal", name, mine / whole, at_most=WINDOW)
        if name.endswith(" packed"):
            equal = timed.get(name.replace("packed", "equal"))
            if (mine := _number(entry, "tflops")) and equal and (even := _number(equal, "tflops")):
                yield _verdict(f"TFLOP/s ≥ {PACKED} × equal lengths", name, mine / even, at_least=PACKED)


def _speed(results: dict[str, Any], peer: str) -> float | None:
    return results.get(peer, {}).get("speed", {}).get("median")


def _number(entry: dict[str, Any], key: str) -> float | None:
    value = entry["results"].get(OWN, {}).get(key)
    return value["median"] if isinstance(value, dict) else value


def _verdict(
    requirement: str, case: str, measured: float, *, at_least: float | None = None, at_most: float | None = None
) -> dict[str, Any]:
    must = at_most if at_least is None else at_least
    met = measured >= at_least if at_least is not None else at_most is not None and measured <= at_most
    entry = {"requirement": requirement, "group": "backward", "case": case}
    return entry | {"measured": measured, "must": must, "met": met}
