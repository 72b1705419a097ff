"""How long kernels take to compile, against a bound that is reported: `python -m bench.compile_times [--arch sm90]`.

Needs no card. Each kernel is compiled to machine code into an empty cache. The time is that of the processor, for this
process and the assembler it starts: what a user of an idle machine waits for. Work that the kernels of an architecture
share (reading their source text) is done before: the first of them is compiled twice and timed once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

import warpattn as wa
from bench.measure.arguments import status
from warpattn.problem import Call, validate
from warpattn.problem.launch import Launch
from warpattn.problem.operands import Operands
from warpattn.runtime.compiler import compiled
from warpattn.runtime.launches import list_launches
from warpattn.sequences import Dense, PagedKV
from warpattn.sequences import Sequence as KeySequence

# Seconds of processor time that a kernel should take at most on one core of a 2.5 GHz server, idle.
BOUNDS_S = {"sm90": 6.0, "sm100": 8.0, "gfx942": 3.0, "gfx950": 3.0}


class Problem(NamedTuple):
    """A name, tensors, and the sequence that says where keys are."""

    name: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sequence: KeySequence
    mask: wa.Mask | None = None
    score: wa.Score | None = None


class Measured(NamedTuple):
    """A kernel of a problem, and the seconds that it took to compile."""

    arch: str
    problem: str
    kernel: str
    seconds: float

    @property
    def within_bound(self) -> bool:
        """Whether it is as fast as it should be."""
        return self.seconds <= BOUNDS_S[self.arch]


def problems() -> Iterator[Problem]:
    """Prefill by head dim, mask and score; decode over pages; latent attention."""
    causal = wa.Causal()
    for dim in (64, 128):
        yield Problem(f"prefill, D {dim}", *dense(1024, 1024, dim), causal)
    yield Problem("prefill, window and soft-cap", *dense(1024, 1024, 128), wa.SlidingWindow(128), wa.SoftCap(30.0))
    yield Problem("prefill, D 72, pages of 3", *paged(40, 72, 3), causal)
    for dim, page in ((128, 16), (128, 64), (64, 3)):
        yield Problem(f"decode, D {dim}, pages of {page}", *paged(1, dim, page), causal)
    k = empty(2, 4096, 1, 576)
    yield Problem("latent attention", empty(2, 1, 128, 576), k, k[..., :512], Dense(), causal)


def empty(*shape: int) -> torch.Tensor:
    """A bf16 tensor whose values do not matter."""
    return torch.empty(shape, dtype=torch.bfloat16)


def dense(seq_q: int, seq_k: int, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Dense]:
    """q, k, v and sequence of 16 query heads on 4."""
    return empty(2, seq_q, 16, dim), empty(2, seq_k, 4, dim), empty(2, seq_k, 4, dim), Dense()


def paged(seq_q: int, dim: int, page: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PagedKV]:
    """The same with two sequences of 2,048 keys in pages."""
    pages = -(-2048 // page)
    table = torch.zeros(2, pages, dtype=torch.int32)
    k, v = empty(pages, page, 4, dim), empty(pages, page, 4, dim)
    return empty(2, seq_q, 16, dim), k, v, PagedKV(k, v, table, torch.full((2,), 2048, dtype=torch.int32))


def launches(problem: Problem, arch: str) -> Sequence[Launch]:
    """What a card of this architecture would launch."""
    _, q, k, v, sequence, mask, score = problem
    call = Call(q, k, v, sequence, mask, score, None, None, True, backend="reference")
    checked = replace(validate(call, read_values=False), backend=arch)
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    return list_launches(checked, Operands(q, k, v, out, torch.empty(checked.lse_shape), None), sequence)


def measure(archs: Sequence[str]) -> Iterator[Measured]:
    """Compile everything, each kernel into a cache of its own."""
    for arch in archs:
        warm = False
        for problem in problems():
            try:
                listed = launches(problem, arch)
            except wa.AttentionError:  # not a problem for this architecture
                continue
            for launch in listed:
                warm = warm or seconds_to_compile(launch) > 0
                yield Measured(arch, problem.name, launch.name, seconds_to_compile(launch))


def seconds_to_compile(launch: Launch) -> float:
    """Processor seconds of one compilation from nothing, child processes included."""
    import triton

    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        before = os.times()
        compiled(launch)
        after = os.times()
    return sum(after[:4]) - sum(before[:4])


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for every kernel, and at the end how many take longer than they should."""
    parser = argparse.ArgumentParser(prog="python -m bench.compile_times", description=__doc__.split("\n")[0])
    parser.add_argument("--arch", choices=tuple(BOUNDS_S), action="append", help="one or more; default: all")
    parser.add_argument("--json", action="store_true", help="print the times as JSON")
    args = parser.parse_args(argv)
    found = []
    for row in measure(args.arch or tuple(BOUNDS_S)):
        found.append(row)
        if not args.json:
            note = "" if row.within_bound else f"  longer than {BOUNDS_S[row.arch]:g} s"
            print(f"{row.arch:7} {row.seconds:6.2f} s  {row.problem}: {row.kernel}{note}", flush=True)
    if args.json:
        print(json.dumps([row._asdict() | {"bound": BOUNDS_S[row.arch]} for row in found], indent=1))
    else:
        print(f"{sum(row.within_bound for row in found)} of {len(found)} kernels within the bounds")


if __name__ == "__main__":
    sys.exit(status(main))
