"""Times what makes 8-bit tensors beside a copy: `python3 -m bench.eight_bit.quantise --json FILE`.

Each way is timed beside a copy that moves as many bytes: those of x are read, twice where the scale of a tensor or a
head is made, and those of the values are written. `q, k, v and values across` is all that products of 8 bits need of
16-bit tensors: three calls, of which that for v writes transposed values, too. Values and scales are compared with
those of torch's operations, bit by bit. Without a GPU, small cases run with torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import warpattn as wa
from bench.eight_bit.running import run_cases
from bench.measure import inputs, record, timing
from bench.measure.arguments import status
from warpattn.quantized import quantize as with_torch

CASES = {"16x1k-16": (16, 1024, 16, 128), "1x16k-16": (1, 16384, 16, 128), "1x64k-32": (1, 65536, 32, 128),
         "1x64k-8-d64": (1, 65536, 8, 64)}  # fmt: skip
SMOKE = {"smoke": (2, 64, 2, 64)}
READS = {"tensor": 2, "head": 2, "token": 1, 64: 1, "given": 1}  # of x
ALL = "q, k, v and values across"
E4M3 = torch.float8_e4m3fn


def copy_of(size: int, device: torch.device) -> Callable[[], Any]:
    """Reads and writes `size` bytes together."""
    source = torch.zeros(size // 2, dtype=torch.uint8, device=device)
    return partial(torch.empty_like(source).copy_, source)


def same(x: Tensor, per: str | int, scale: Tensor | None, transposed: bool = False) -> bool:
    """Whether kernels make what torch makes."""
    made = [make(x, E4M3, per=per, scale=scale, transposed=transposed) for make in (wa.quantize, with_torch)]
    bits = [torch.cat([x.view(torch.uint8).flatten() for x in (each.values, each.transposed) if x is not None])
            for each in made]  # fmt: skip
    return torch.equal(*bits) and torch.equal(made[0].scale, made[1].scale)


def products(x: Tensor) -> Callable[[], None]:
    """What products of 8 bits need of q, k and v of the shape of x."""
    given = [x, x.clone(), x.clone()]

    def call() -> None:
        for each in given:
            wa.quantize(each, per="head", transposed=each is given[2])

    return call


def run_case(name: str, shape: tuple[int, ...], rounds: int, seed: int) -> dict[str, Any]:
    """Checks and times every way of one shape; one entry of the record's `cases`."""
    device = inputs.default_device()
    torch.manual_seed(seed)
    x = torch.randn(shape, device=device).bfloat16()
    one = torch.full((), 0.01, device=device)
    calls: dict[str, Callable[[], Any]] = {}
    moved: dict[str, int] = {}
    results: dict[str, dict[str, Any]] = {}
    for way, reads in READS.items():
        per, scale = ("tensor", one) if way == "given" else (way, None)
        label = str(way)
        results[label] = {"status": "timed" if same(x, per, scale) else "wrong"}
        calls[label] = partial(wa.quantize, x, E4M3, per=per, scale=scale)
        moved[label] = (2 * reads + 1) * x.numel()
    calls[ALL], moved[ALL] = products(x), (3 * 5 + 1) * x.numel()
    results[ALL] = {"status": "timed" if same(x, "head", None, transposed=True) else "wrong"}
    copies = {f"copy for {way}": copy_of(size, device) for way, size in moved.items()}
    samples = {way: timing.sample([call], device) for way, call in {**calls, **copies}.items()}
    times = timing.interleave(samples, rounds, seed)
    for way, size in moved.items():
        summary = timing.Summary.of(times[way])
        ratio = timing.paired_ratio(times[f"copy for {way}"], times[way]).asdict()
        results[way] |= {"ms": summary.asdict(), "tb_s": size / (summary.median * 1e9), "speed": ratio}
    return {"group": "quantise", "case": {"name": name, "shape": shape}, "bytes": moved, "results": results}


def render(found: record.Record) -> str:
    """A line for every case and way: microseconds, TB/s, and its bytes/s as a multiple of a copy's."""
    lines = [f"{'case':<14}{'scale per':<28}{'us':>9}{'TB/s':>7}{'x copy':>8}"]
    for entry in found["cases"]:
        for way, result in entry["results"].items():
            head = f"{entry['case']['name']:<14}{way:<28}{1000 * result['ms']['median']:9.1f}{result['tb_s']:7.2f}"
            wrong = "" if result["status"] == "timed" else "  wrong"
            lines.append(f"{head}{result['speed']['median']:8.3f}{wrong}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 if a result was wrong."""
    shapes = CASES if torch.cuda.is_available() else SMOKE
    cases = {name: partial(run_case, name, shape) for name, shape in shapes.items()}
    return run_cases("bench.eight_bit.quantise", __doc__, argv, cases, render)


if __name__ == "__main__":
    sys.exit(status(main))
