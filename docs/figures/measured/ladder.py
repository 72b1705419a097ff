"""Writes docs/ladder.md and its picture: the rungs from their record, the later steps from what bench/notes.md records.

The rungs below the first measured kernel are in `bench/results/h200/ladder.json` (`python -m bench.ladder`); without
that file the page has none. `CASES` names experiments of notes.md and the thousands of SM cycles recorded there; a test
holds each number against its experiment. The floor of a case is arithmetic: its key tiles times the cycles that the
tensor core needs for one, over the SMs of an H200; utilisation is floor over measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from docs.figures.svg import BLUE, GREY, box, picture, words

HERE = Path(__file__).parent
RECORD = HERE.parents[2] / "bench" / "results" / "h200" / "ladder.json"
Record = dict[str, Any]
SMS, CYCLES = 132, 2048  # of an H200; of both products of a tile of 128 × 128 at head dim 128 (or 128 × 64 at 256)


class Case(NamedTuple):
    """A shape in bf16."""

    name: str
    batch: int
    length: int
    heads: int
    keys: int  # of a tile
    causal: bool

    @property
    def floor(self) -> float:
        """Cycles that the products alone take, spread evenly over all SMs; whole tiles on the diagonal."""
        rows, wide = self.length // 128, 128 // self.keys
        tiles = rows * (rows + 1) / 2 * wide if self.causal else rows * rows * wide
        return self.batch * self.heads * tiles * CYCLES / SMS


class Step(NamedTuple):
    """One measurement: number of the experiment in bench/notes.md, what was new, thousands of cycles."""

    experiment: int
    what: str
    kilocycles: int

    def use(self, case: Case) -> float:
        """Part of the time in which the tensor cores had to work."""
        return case.floor / (self.kilocycles * 1000)


CASES = {
    Case("D 128, 1 × 8k, full", 1, 8192, 16, 128, False): [
        Step(1, "two warpgroups, rings, Q·K of the next tile before P·V", 1442),
        Step(2, "P carried in fp32", 1367),
        Step(4, "lazy maximum, row sums per lane, P packed in pairs", 1289),
    ],
    Case("D 128, 16 × 1k, full", 16, 1024, 16, 128, False): [
        Step(1, "two warpgroups, rings, Q·K of the next tile before P·V", 429),
        Step(7, "before: with the softmax of experiments 4 and 5", 394),
        Step(7, "the producer fetches, divides and loads ahead", 380),
        Step(8, "Q given back early, tail test in the tail only", 373),
        Step(9, "as few heads at a time as fill the SMs", 360),
        Step(11, "one loop over key tiles, as shipped", 355),
    ],
    Case("D 128, 1 × 16k, causal", 1, 16384, 16, 128, True): [
        Step(10, "before: tiles claimed two ahead", 2707),
        Step(10, "a tile is fetched late; even sections", 2466),
        Step(11, "one loop over key tiles, as shipped", 2537),
    ],
    Case("D 256, 1 × 16k, causal", 1, 16384, 8, 64, True): [
        Step(10, "before: tiles claimed two ahead", 2459),
        Step(10, "a tile is fetched late; even sections", 2147),
        Step(11, "one loop over key tiles, as shipped", 2172),
    ],
}


INTRODUCTION = """# The ladder

How the Hopper kernel became as fast as it is, one measured change after the other. Cycles are SM cycles of whole
kernels on an H200.

![Use of the tensor cores, step by step](figures/measured/ladder.svg)

*Tensor cores in use* is the floor over the measured cycles. The floor is arithmetic: every 128 × 128 tile at head dim
128 takes the tensor cores 2048 cycles for its two products, spread evenly over 132 SMs, and nothing else takes time.
"""

RUNGS = """## From a naive kernel to the shipped one

Each rung is a small, complete kernel in `bench/ladder/`: [naive](../bench/ladder/naive.py), the same
[with TMA](../bench/ladder/tma.py), and [with specialised warps](../bench/ladder/specialised.py). Their results are held
against the shipped kernel before anything is timed, and against the reference in the simulator.
"""

STEPS = """## From the first fast kernel to the shipped one

Cycles of `python -m bench.ncu`, 2026-11-20 and 2026-11-21; each is in the experiment of
[bench/notes.md](../bench/notes.md) that the table names, with what was predicted before the run and why it did or
did not come true.
"""

LESSONS = """What the steps teach:

- **The softmax of one warpgroup is the bound, not the loads.** Without any load the kernel still took 1323 k
  cycles (experiment 3), with them 1367 k (2). So instructions on that chain are what counts: fewer multiplications,
  fewer exchanges between lanes, no re-packing (2 to 5).
- **Short sequences lose at the seams.** At 1 k a tile has eight key tiles, so the time between tiles weighs as much as
  the loop; the producer works ahead there (6 to 9).
- **The order of tiles is a schedule.** With a causal mask tiles differ in length, and the longest go first. A tile that
  is claimed early breaks that order: fetching late was worth 9 % of the cycles at head dim 128 and 13 % at 256,
  together with even sections (10).
- **Compile time is a cost, too.** The last step gave up to 3 % back, to bring the first call below 6 seconds (11).
"""

UNMEASURED = """This table begins with the first kernel that was measured; it already had TMA, rings and two warpgroups.
Simpler ones are in `bench/ladder/`: [naive](../bench/ladder/naive.py), [with TMA](../bench/ladder/tma.py),
[with specialised warps](../bench/ladder/specialised.py). These have run in the simulator; no card has timed them yet
(`python -m bench.ladder`). Times against other libraries are under [benchmarks](benchmarks.md).
"""

MEASURED = "Times against other libraries are under [benchmarks](benchmarks.md).\n"


def recorded() -> Record | None:
    """The record of the rungs, if they have been measured."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else None


def page(record: Record | None) -> str:
    """The whole page, as Markdown."""
    rungs = [] if record is None else [RUNGS, f"{rung_table(record)}\n{_source(record)}\n"]
    return "\n".join([INTRODUCTION, *rungs, STEPS, table(), LESSONS, UNMEASURED if record is None else MEASURED])


def _source(record: Record) -> str:
    machine = record["machine"]
    return f"`{record['command']}`, {record['date'][:10]}, {machine['gpu']} ({machine['power_limit']} limit)."


def rung_case(case: Record) -> Case:
    """A case of the record."""
    name = f"D {case['dim']}, {case['batch']} × {case['seq_q'] // 1024}k, {'causal' if case['causal'] else 'full'}"
    return Case(name, case["batch"], case["seq_q"], case["heads_q"], 128 * 128 // case["dim"], case["causal"])


def rung_table(record: Record) -> str:
    """The rungs as Markdown; tensor pipe active is what the hardware counted."""
    titles = ("case", "rung", "ms", "TFLOP/s", "k cycles", "tensor cores in use", "tensor pipe active")
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for entry in record["cases"]:
        case = rung_case(entry["case"])
        for i, rung in enumerate(entry["rungs"].values()):
            numbers = _numbers(case, rung) if rung["status"] == "timed" else ("wrong", *"––––")
            lines.append("| " + " | ".join([case.name if i == 0 else "", rung["what"], *numbers]) + " |")
    return "\n".join(lines) + "\n"


def _numbers(case: Case, rung: Record) -> tuple[str, ...]:
    times = (f"{rung['ms']['median']:.2f}", f"{rung['tflops']:.0f}")
    metrics = rung.get("metrics") or {}
    cycles, active = metrics.get("cycles"), metrics.get("tensor_percent")
    use = (f"{cycles / 1000:.0f}", f"{case.floor / cycles:.0%}") if cycles else ("–", "–")
    return (*times, *use, "–" if active is None else f"{active:.0f}%")


def rung_steps(record: Record | None) -> Iterator[tuple[Case, list[Step]]]:
    """The rungs whose cycles were counted, as the picture shows them."""
    for entry in [] if record is None else record["cases"]:
        rungs = [rung for rung in entry["rungs"].values() if (rung.get("metrics") or {}).get("cycles")]
        steps = [Step(0, rung["what"], round(rung["metrics"]["cycles"] / 1000)) for rung in rungs]
        if steps:
            yield rung_case(entry["case"]), steps


def table() -> str:
    """The steps as Markdown."""
    lines = ["| case | step | experiment | k cycles | tensor cores in use |", "|---|---|---|---|---|"]
    for case, steps in CASES.items():
        for i, step in enumerate(steps):
            name = case.name if i == 0 else ""
            lines.append(f"| {name} | {step.what} | {step.experiment} | {step.kilocycles} | {step.use(case):.0%} |")
    return "\n".join(lines) + "\n"


def chart(record: Record | None) -> str:
    """A bar for each rung and step, as long as the tensor cores are in use."""
    left, full, parts, y = 20, 400, [], 10
    for case, steps in [*rung_steps(record), *CASES.items()]:
        parts.append(words(left, y + 16, f"{case.name}: floor {case.floor / 1000:.0f} k cycles", 13))
        y += 24
        for step in steps:
            parts += [box(left, y, full, 18), box(left, y, full * step.use(case), 18, BLUE)]
            parts.append(words(left + 6, y + 13, f"{step.use(case):.0%}", 12, "white"))
            parts.append(words(left + full + 10, y + 13, f"{step.kilocycles} k · {step.what}", 12, GREY))
            y += 22
        y += 12
    return picture(left + full + 440, y, parts)


def files() -> dict[Path, str]:
    """The page and the picture."""
    record = recorded()
    return {HERE.parents[1] / "ladder.md": page(record), HERE / "ladder.svg": chart(record)}
