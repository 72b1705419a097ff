"""Times ragged and paged prefill beside dense prefill of the same work: `python3 -m bench.ragged --json FILE`.

Causal, 16 heads, D 128, bf16, 16,384 tokens in all, cut into sequences in different ways. Where all sequences are
equally long the dense call gets the same tensors as a batch and the bits must be the same; else it gets sequences of
one length for which Σ n² over all tokens is the same, and TFLOP/s are what is compared. Everything runs in CUDA graphs,
interleaved. Without a GPU, small cases run with the reference.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import warpattn as wa
from bench.measure import arguments, record, timing
from bench.measure.inputs import default_device

Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A batch of sequences, causal, queries and keys of the same lengths; pages are tried where they are all equal."""

    name: str
    lengths: tuple[int, ...]
    heads: int = 16
    dim: int = 128
    pages: tuple[int, ...] = (16, 64, 128)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def even(self) -> bool:
        """Whether all sequences are equally long."""
        return len(set(self.lengths)) == 1

    @property
    def same_work(self) -> tuple[int, int]:
        """(batch, length) of the dense call: as many tokens, and per token as many keys on average."""
        length = round(sum(n * n for n in self.lengths) / self.tokens)
        return max(1, round(self.tokens / length)), length


def flops(lengths: Sequence[int], case: Case) -> float:
    """Multiplications and additions of both products on the visible half."""
    return 2.0 * case.heads * case.dim * sum(n * n for n in lengths)


def zipf(tokens: int, longest: int) -> tuple[int, ...]:
    """Lengths longest / rank, at least 64, until `tokens` are used up, in an order that is no order."""
    found: list[int] = []
    while sum(found) < tokens:
        found.append(min(tokens - sum(found), max(64, longest // (len(found) + 1))))
    return tuple(found[37 * i % len(found)] for i in range(len(found))) if len(found) % 37 else tuple(found)


def cases() -> tuple[Case, ...]:
    """The mixes that are timed on a card."""
    tokens = 16384
    return (
        Case("16x1k", (1024,) * 16),
        Case("4x4k", (4096,) * 4),
        Case("1x16k", (tokens,)),
        Case("zipf-4k", zipf(tokens, 4096)),
        Case("zipf-8k", zipf(tokens, 8192)),
        Case("64x256", (256,) * 64),
    )


def smoke_cases() -> tuple[Case, ...]:
    """Small ones for a CPU."""
    return (Case("smoke-2x64", (64, 64), 2, 32, (16,)), Case("smoke-uneven", (100, 30, 1), 2, 32))


def make(case: Case, device: torch.device, seed: int) -> dict[str, tuple[Call, Sequence[int]]]:
    """What is timed: {name: (call, lengths of its sequences)}; every call gives (tokens, heads, dim)."""
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = torch.bfloat16

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    q, k, v = (draw(case.tokens, case.heads, case.dim) for _ in range(3))
    ends = torch.tensor([0, *case.lengths], device=device).cumsum(0).to(torch.int32)
    mask, ragged = wa.Causal(), wa.Ragged(ends)
    found: dict[str, tuple[Call, Sequence[int]]] = {
        "ragged": (lambda: wa.attention_varlen(q, k, v, ragged, mask=mask), case.lengths)
    }
    batch, length = case.same_work
    shape = (batch, length, case.heads, case.dim)
    dq, dk, dv = (x.view(shape) for x in (q, k, v)) if case.even else (draw(*shape) for _ in range(3))
    found["dense"] = (lambda: _tokens(wa.attention(dq, dk, dv, mask=mask)), (length,) * batch)
    for page in case.pages if case.even else ():
        count = case.tokens // page
        order = torch.randperm(count, generator=generator, device=device)
        pages = [torch.empty(count, page, case.heads, case.dim, device=device, dtype=dtype) for _ in range(2)]
        for cache, x in zip(pages, (k, v), strict=True):
            cache[order] = x.view(cache.shape)
        lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
        paged = wa.PagedKV(pages[0], pages[1], order.to(torch.int32).view(batch, -1), lengths)
        call = lambda paged=paged: _tokens(wa.attention_paged(q.view(shape), paged, mask=mask))  # noqa: E731
        found[f"page{page}"] = (call, case.lengths)
    return found


def _tokens(out: Any) -> Tensor:
    """(batch, length, heads, dim) to (tokens, heads, dim)."""
    return out.flatten(0, 1)


def run_case(case: Case, rounds: int, seed: int) -> dict[str, Any]:
    """Checks and times one case; one entry of the record's `cases`."""
    device = default_device()
    calls = make(case, device, seed)
    want = calls["ragged"][0]()
    results: dict[str, dict[str, Any]] = {}
    samples: dict[str, timing.Sample] = {}
    for name, (call, _) in calls.items():
        error = (call() - want).abs().max().item() if case.even else None
        same = error is None or error <= (0.0 if name == "dense" and device.type == "cuda" else 2e-2)
        results[name] = {"status": "timed" if same else "wrong", "reason": None, "error": error}
        if same:
            samples[name] = timing.sample([call], device)
    times = timing.interleave(samples, rounds, seed)
    for name, taken in times.items():
        summary = timing.Summary.of(taken)
        work = flops(calls[name][1], case)
        results[name] |= {
            "mode": samples[name].mode, "calls": samples[name].calls, "ms": summary.asdict(),
            "tflops": work / summary.median / 1e9,
        }  # fmt: skip
    return {"group": "ragged", "case": asdict(case) | {"same_work": case.same_work}, "results": results}


def render(found: record.Record) -> str:
    """A line for every case and way: microseconds, TFLOP/s, and TFLOP/s over those of dense."""
    lines = [f"{'case':<12}{'sequences':>10}  {'way':<10}{'us':>10}{'TFLOP/s':>10}{'x dense':>9}"]
    for entry in found["cases"]:
        dense = entry["results"]["dense"].get("tflops")
        for name, result in entry["results"].items():
            head = f"{entry['case']['name']:<12}{len(entry['case']['lengths']):>10}  {name:<10}"
            if "ms" not in result:
                lines.append(f"{head}  {result['status']}: largest difference {result['error']:.3g}")
                continue
            ratio = f"{result['tflops'] / dense:9.3f}" if dense else ""
            lines.append(f"{head}{1000 * result['ms']['median']:10.1f}{result['tflops']:10.1f}{ratio}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 if something was wrong."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = arguments.timed_cases("bench.ragged", __doc__)
    args = parser.parse_args(argv)
    found = record.start("bench.ragged", argv, {"rounds": args.rounds, "seed": args.seed})
    with torch.no_grad():
        for case in cases() if torch.cuda.is_available() else smoke_cases():
            if args.only in case.name:
                found["cases"].append(run_case(case, args.rounds, args.seed))
                if args.json is not None:
                    record.write(found, args.json)
    print(render(found), flush=True)
    return int(any(result["status"] == "wrong" for entry in found["cases"] for result in entry["results"].values()))


if __name__ == "__main__":
    sys.exit(arguments.status(main))
