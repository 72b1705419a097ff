"""Draws the timelines of docs/kernels/cdna.md and makes its table: three kinds of K and V buffers on one problem.

    python -m docs.figures timelines.cdna      three SVGs, and the table in the page

One workgroup on a CU of its own, 128 queries against 512 keys, no mask, head dim 128, bf16. Cycles are those of the
simulator's cost model; instruction counts are those of the machine code that Triton makes.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from docs.figures.timelines.simulated import timeline
from warpattn.kernels.cdna.launch import launches_of_choice
from warpattn.kernels.cdna.select import prefill_config
from warpattn.machine_code import gcn
from warpattn.masks import Full
from warpattn.problem import Call, validate
from warpattn.problem.arch import triton_target
from warpattn.problem.element import BF16
from warpattn.problem.launch import Choice, Launch
from warpattn.problem.operands import Operands
from warpattn.runtime.simulate import Options, run_launch
from warpattn.sequences import Dense
from warpattn.sim import Report

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "kernels" / "cdna.md"
KINDS = ("lds", "registers", "ring")
ARCHS = ("gfx942", "gfx950")
QUERIES, KEYS, DIM = 128, 512, 128
START, END = 6_000, 20_000  # cycles that the pictures show
HEAD = ("", "`KVBufferLDS`", "`KVBuffer`", "`KVBufferRing`")


class Run(NamedTuple):
    """What one kind of buffers costs on one architecture; cycles are the model's."""

    cycles: float
    matrix: float  # in which the matrix cores work
    waits: float  # in which the waves wait for copies to LDS
    loads: float  # in which they are held by loads of K and V into registers
    code: gcn.Summary
    copies: gcn.Check


def step_of(kind: str, arch: str) -> Launch:
    """The launch of the problem with one kind of buffers."""
    torch.manual_seed(0)
    q = torch.randn(1, QUERIES, 1, DIM).bfloat16()
    k, v = (torch.randn(1, KEYS, 1, DIM).bfloat16() for _ in range(2))
    ready = validate(Call(q, k, v, Dense(), Full(), backend=f"simulate:{arch}"))
    config, _ = prefill_config(BF16, DIM, DIM, arch, kind)
    operands = Operands(q, k, v, torch.full_like(q, torch.nan), None, None)
    (step,) = launches_of_choice(ready, operands, Dense(), Choice("prefill", config, (), (), ()))
    return step


@cache
def simulated(kind: str, arch: str) -> Report:
    """The launch in the simulator, timed by the model of `arch`."""
    return run_launch(step_of(kind, arch), Options(timing=True))


def compiled(step: Launch) -> Any:
    """Triton's kernel of a step, with its machine code."""
    import triton

    return triton.compile(step.source(), target=triton_target(step.arch), options=dict(step.options))


@cache
def measured(kind: str, arch: str) -> Run:
    """One kind of buffers on one architecture."""
    kernel, timing = compiled(step_of(kind, arch)), simulated(kind, arch).timing
    spans = timing.of(timing.roles[0])
    waits = sum(span.end - span.start for span in spans if span.kind == "wait")
    loads = [span.end - span.start for span in spans if span.name == "buffer_load"][1:]  # the first is that of Q
    text = kernel.asm["amdgcn"]
    code = gcn.summary(text, kernel.metadata.shared)
    return Run(timing.cycles, timing.busy("tensor core"), waits, sum(loads), code, gcn.check_copies(text))


def table(arch: str) -> str:
    """The comparison on one architecture, as the page has it."""
    runs = [measured(kind, arch) for kind in KINDS]
    lines = {
        "cycles, by the model": [_thousands(r.cycles) for r in runs],
        "… in which the matrix cores work": [_thousands(r.matrix) for r in runs],
        "… in which the waves wait for copies to LDS": [_thousands(r.waits) for r in runs],
        "… in which loads into registers hold them (see below)": [_thousands(r.loads) for r in runs],
        "copies to LDS / loads, instructions": [f"{r.code.copies} / {_loads(r.code)}" for r in runs],
        "`s_waitcnt vmcnt(n)`: n, times": [_waits(r.code) for r in runs],
        "`ds_read*` / of them transposing / `ds_write*`": [
            f"{r.code.count('ds_read')} / {_transposing(r.code)} / {r.code.count('ds_write')}" for r in runs
        ],
        "`v_mfma*` / `s_barrier`": [f"{r.code.count('v_mfma')} / {r.code.counts['s_barrier']}" for r in runs],
        "VGPRs + AGPRs, spilled": [f"{r.code.vgprs} + {r.code.agprs}, {r.code.vgpr_spills}" for r in runs],
        "LDS, bytes": [f"{r.code.lds:,}" for r in runs],
        "waves that a SIMD can hold": [str(r.code.occupancy) for r in runs],
        "order of copies, stores and reads in LDS": [_checked(r.copies) for r in runs],
    }
    rows = [HEAD, ("---",) * len(HEAD), *((name, *cells) for name, cells in lines.items())]
    return "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows)


def _thousands(cycles: float) -> str:
    return f"{cycles / 1000:.1f} k"


def _loads(code: gcn.Summary) -> int:
    return code.count("buffer_load") - code.copies


def _waits(code: gcn.Summary) -> str:
    return ", ".join(f"{n}" if times == 1 else f"{n} (×{times})" for n, times in code.waits.items())


def _transposing(code: gcn.Summary) -> int:
    return sum(times for name, times in code.counts.items() if name.startswith("ds_read") and "_tr_" in name)


def _checked(found: gcn.Check) -> str:
    return f"{len(found.findings)} findings" if found.findings else "proven" if found.complete else "not complete"


def in_page(text: str) -> str:
    """The page with the tables of today."""
    for arch in ARCHS:
        head, mark, rest = text.partition(f"<!-- table {arch} -->\n\n")
        text = head + mark + table(arch) + rest[rest.index("\n\n") :]
    return text


def files() -> dict[Path, str]:
    """The timelines of gfx950, and the page with its tables."""
    drawn = {HERE / f"cdna-{kind}.svg": timeline(simulated(kind, "gfx950"), START, END) for kind in KINDS}
    return drawn | {PAGE: in_page(PAGE.read_text())}
