"""Times gradients: `python -m bench.backward --dims 128,64 --rounds 20 --json FILE`.

Five shapes of 16 k tokens, full and causal, our launches against the backward of torch's cuDNN SDPA (and flash-attn-4's
with --peers), in turn in every round. Each peer's gradients are compared with fp32 before it is timed, on the first two
heads. TFLOP/s count 10·B·H·Sq·Sk·D, half if causal.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import record, timing
from bench.peers.adapter import first_line
from warpattn.kernels.sm90.backward.launch import list_backward_launches
from warpattn.masks import Causal, Mask, SlidingWindow
from warpattn.problem import Call, validate
from warpattn.problem.backward import CheckedBackward, Gradients, fitted_gradients
from warpattn.problem.launch import Launch
from warpattn.runtime.bound_launches import BoundLaunches
from warpattn.sequences import Dense

ERROR = 2e-2  # of the largest gradient, in bf16
SAMPLE_MS = 4.0


@dataclass(frozen=True)
class Case:
    """One problem; `window`: keys that a row sees, None for all or, if causal, those before it."""

    batch: int
    seq: int
    heads: int
    dim: int
    causal: bool
    heads_kv: int | None = None
    window: int | None = None

    @property
    def name(self) -> str:
        kind = f"window-{self.window}" if self.window else "causal" if self.causal else "full"
        heads = f"{self.heads}" if self.heads_kv is None else f"{self.heads}/{self.heads_kv}"
        return f"{self.batch}x{self.seq} heads {heads} dim {self.dim} {kind}"

    @property
    def mask(self) -> Mask | None:
        return SlidingWindow(self.window) if self.window else Causal() if self.causal else None

    def flops(self) -> float:
        """Of five products."""
        pairs = self.seq * min(self.window or self.seq, self.seq)
        return 10.0 * self.batch * self.heads * pairs * self.dim * (0.5 if self.causal and not self.window else 1.0)


@dataclass(frozen=True, eq=False)
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


Gradient = Callable[[], tuple[Tensor, Tensor, Tensor]]


def own(case: Case, x: Inputs, deterministic: bool = False) -> Gradient:
    """Our launches on tensors that stay."""
    bound, made = prepared(case, x, deterministic)

    def call() -> tuple[Tensor, Tensor, Tensor]:
        bound.launch()
        return made.dq, made.dk, made.dv

    return call


def deterministic(case: Case, x: Inputs) -> Gradient:
    """The same with the same bits in every run."""
    return own(case, x, deterministic=True)


def prepared(case: Case, x: Inputs, deterministic: bool) -> tuple[BoundLaunches, Gradients]:
    """Bound launches of a case and the tensors that they write."""
    import warpattn as wa

    with torch.no_grad():
        out, lse = wa.attention(x.q, x.k, x.v, mask=case.mask, return_lse=True)
    made = gradients_of(x, out, lse)
    return BoundLaunches(launches(case, x, made, deterministic), x.q.get_device()), made


def gradients_of(x: Inputs, out: Tensor, lse: Tensor) -> Gradients:
    """The tensors of a backward call, gradients in fresh memory."""
    fresh = [torch.empty_like(t) for t in (x.q, x.k, x.v)]
    return fitted_gradients(Gradients(x.q, x.k, x.v, out, lse, x.dout, None, None, *fresh, None))


def launches(case: Case, x: Inputs, made: Gradients, deterministic: bool = False) -> tuple[Launch, ...]:
    """Of a backward call."""
    backend = "auto" if x.q.is_cuda else "simulate:sm90"
    forward = validate(Call(x.q, x.k, x.v, Dense(), case.mask, None, None, None, True, None, backend))
    return list_backward_launches(CheckedBackward.of(forward, deterministic), made)


def cudnn(case: Case, x: Inputs) -> Gradient:
    """The backward of torch's SDPA by cuDNN."""
    if case.window:
        raise ValueError("torch's SDPA has no window")
    leaves = [t.detach().transpose(1, 2).requires_grad_() for t in (x.q, x.k, x.v)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(
            *leaves, is_causal=case.causal, enable_gqa=case.heads_kv is not None
        )
    return _autograd(out, leaves, x.dout.transpose(1, 2), lambda t: t.transpose(1, 2))


def fa4(case: Case, x: Inputs) -> Gradient:
    """flash-attn-4."""
    from flash_attn.cute.interface import flash_attn_func

    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    window = (case.window - 1, 0) if case.window else (None, None)
    out = flash_attn_func(*leaves, causal=case.causal and not case.window, window_size=window)[0]
    return _autograd(out, leaves, x.dout, lambda t: t)


def _autograd(out: Tensor, leaves: list[Tensor], dout: Tensor, view: Callable[[Tensor], Tensor]) -> Gradient:
    def call() -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        return view(dq), view(dk), view(dv)

    return call


PEERS = {"warpattn": own, "deterministic": deterministic, "cudnn": cudnn, "fa4": fa4}


class EagerSample:
    """Several calls between two events: a backward takes far longer than its launch on the host."""

    mode = "eager"
    note = None

    def __init__(self, call: Gradient) -> None:
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._call, self.calls = call, 3
        for _ in range(2):
            self.start()
            estimate = self.milliseconds()
        self.calls = max(2, round(SAMPLE_MS / max(estimate, 1e-3)))

    def start(self) -> None:
        """Enqueue the sample between its two events."""
        self._begin.record()
        for _ in range(self.calls):
            self._call()
        self._end.record()

    def milliseconds(self) -> float:
        """Wait for the sample."""
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) / self.calls


def make(case: Case, device: str, seed: int = 0) -> Inputs:
    """Random bf16 inputs."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(heads: int) -> Tensor:
        sizes = (case.batch, case.seq, heads, case.dim)
        return torch.randn(sizes, generator=generator, device=device, dtype=torch.bfloat16)

    kv = case.heads_kv or case.heads
    return Inputs(draw(case.heads), draw(kv), draw(kv), draw(case.heads))


def errors(case: Case, x: Inputs, made: tuple[Tensor, Tensor, Tensor]) -> list[float]:
    """Of dq, dk, dv of the first batch entry and key head, relative to the largest true value."""
    group = case.heads // (case.heads_kv or case.heads)
    q, dout = (t[0, :, :group].float().transpose(0, 1) for t in (x.q, x.dout))
    k, v = (t[0, :, :1].float().transpose(0, 1) for t in (x.k, x.v))
    truth = [torch.zeros_like(t) for t in (q, k, v)]
    for start in range(0, case.seq, 1024):  # rows whose scores exist at a time
        rows = slice(start, start + 1024)
        leaves = [t.clone().requires_grad_() for t in (q[:, rows], k, v)]
        at = torch.arange(case.seq, device=q.device)
        back = at[rows, None] - at[None, :]
        hidden = (back < 0) if case.causal or case.window else torch.zeros_like(back, dtype=torch.bool)
        hidden = hidden | (back >= case.window) if case.window else hidden
        s = (leaves[0] @ leaves[1].transpose(1, 2)) * case.dim**-0.5
        out = s.masked_fill(hidden, -torch.inf).softmax(-1) @ leaves[2]
        dq, dk, dv = torch.autograd.grad(out, leaves, dout[:, rows])
        truth[0][:, rows] = dq
        truth[1] += dk
        truth[2] += dv
    taken = (made[0][0, :, :group], made[1][0, :, :1], made[2][0, :, :1])
    pairs = zip(taken, truth, strict=True)
    return [((t.transpose(0, 1).float() - want).abs().max() / want.abs().max()).item() for t, want in pairs]


def cases(dims: Sequence[int], masks: Sequence[str], only: str) -> list[Case]:
    """The required shapes: 16 heads of 128, 32 of 64, 8 of 256; a window of 1024; 64 heads of 8 key heads, causal."""
    found = []
    for dim in dims:
        heads = 2048 // dim
        for kind in masks:
            if kind == "window":
                found.append(Case(1, 16384, heads, dim, True, window=1024))
            elif kind == "groups":
                found.append(Case(4, 4096, 64, dim, True, heads_kv=8))
            else:
                lengths = (1024, 2048, 4096, 8192, 16384)
                found += [Case(16384 // seq, seq, heads, dim, kind == "causal") for seq in lengths]
    return [case for case in found if only in case.name]


def compile_one(case: Case) -> None:
    """Fill the disk cache with the kernels of a case, without a card."""
    from functools import partial

    from warpattn.runtime import compiler, kernel_cache

    rows = min(case.seq, 4096)  # the configuration depends on whether there are many
    small = Case(1, rows, case.heads_kv or 1, case.dim, case.causal, None, case.window)
    x = make(small, "cpu")
    made = gradients_of(x, torch.empty_like(x.dout), torch.empty(1, small.heads, rows))
    for launch in (*launches(small, x, made), *launches(small, x, made, deterministic=True)):
        kernel_cache.find((launch.name, launch.arch, launch.key), partial(compiler.artifact_of, launch))


def check(name: str, case: Case, x: Inputs) -> tuple[dict[str, Any], timing.Sample | None]:
    """The result of a peer's gradients so far, and a sample of them if they are right."""
    try:
        call = PEERS[name](case, x)
        wrong = errors(case, x, call())
        fine = all(e <= ERROR for e in wrong)
        return {"status": "timed" if fine else "wrong", "error": wrong}, EagerSample(call) if fine else None
    except Exception as error:
        return {"status": "failed", "reason": first_line(error)}, None


def run_case(case: Case, peers: Sequence[str], rounds: int) -> dict[str, Any]:
    """Check and time every peer; one entry of the record."""
    x = make(case, "cuda")
    results: dict[str, dict[str, Any]] = {}
    samples: dict[str, timing.Sample] = {}
    for name in peers:
        results[name], found = check(name, case, x)
        if found is not None:
            samples[name] = found
    times = timing.interleave(samples, rounds, 0)
    for name, taken in times.items():
        ms = timing.Summary.of(taken)
        results[name] |= {"ms": ms.asdict(), "tflops": case.flops() / ms.median / 1e9}
        if name != "warpattn" and "warpattn" in times:
            results[name]["speed"] = timing.paired_ratio(taken, times["warpattn"]).asdict()
    print(line(case, results), flush=True)
    return {"group": "backward", "case": asdict(case) | {"name": case.name}, "flops": case.flops(), "results": results}


def line(case: Case, results: dict[str, dict[str, Any]]) -> str:
    """One line of the table."""
    parts = [f"{case.name:34}"]
    for name, result in results.items():
        if result["status"] != "timed":
            parts.append(f"{name} {result['status']} {result.get('reason', result.get('error'))}")
            continue
        speed = f" ({result['speed']['median']:.3f})" if "speed" in result else ""
        took = f"{result['ms']['median']:.3f} ms {result['tflops']:.0f}"
        parts.append(f"{name} {took}{speed} err {max(result['error']):.1e}")
    return " | ".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 if a gradient of ours was wrong."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dims", default="128,64")
    parser.add_argument("--masks", default="full,causal")
    parser.add_argument("--only", default="")
    parser.add_argument("--peers", default="warpattn,cudnn")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    listed = cases([int(d) for d in args.dims.split(",")], args.masks.split(","), args.only)
    kinds = {(case.dim, case.causal, case.window, case.seq <= 2048): case for case in listed}
    with ProcessPoolExecutor(min(16, len(kinds)), mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, kinds.values()))
    found = record.start("bench.backward", argv, {"rounds": args.rounds})
    found["cases"] = [run_case(case, args.peers.split(","), args.rounds) for case in listed]
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    return int(any(entry["results"].get("warpattn", {}).get("status") != "timed" for entry in found["cases"]))


__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
