"""Times decode steps in bytes of K and V per second: `python3 -m bench.decode --peers warpattn,cudnn --json FILE`.

One query token a sequence, keys dense or in shuffled pages, every call in a CUDA graph, peers interleaved as in
`bench.run`. A variant of the kernel is a peer of its own: `--variant ctas=2 --variant block_n=64,stages=6` times the
chosen configuration and these fields beside it. Calls take turns as the layers of a model do: each has keys and values
of its own, all have one table and, where a peer plans, one plan. There are so many layers that they are forty times as
large as L2 of an H200, or 16, so that reading is what is timed; the peer `read` does nothing else. Without a GPU, a few
small cases run with the reference.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from bench.decode.cases import Case, Inputs, cases, make_layers, smoke_cases
from bench.decode.peers import EVERY, OWN, Peer, peers
from bench.measure import arguments, record, timing
from bench.measure.inputs import default_device
from bench.peers.adapter import Unsupported, first_line

COLD = 2 << 30  # bytes of layers used in turn: keys prefetched to L2 must be gone before they are needed again
MOST_LAYERS = 16


def expected(x: Inputs) -> tuple[Tensor, float]:
    """(fp32 output, largest error that counts as right: twice that of the same in the case's dtype, and rounding)."""
    outs = [(_attend(x, b, torch.float32), _attend(x, b, x.q.dtype)) for b in range(x.case.batch)]
    out = torch.stack([exact for exact, _ in outs])
    same = (torch.stack([rough for _, rough in outs]).float() - out).abs().max().item()
    rounding = (out.to(x.q.dtype).float() - out).abs().max().item()
    return out, 2 * same + 2 * rounding


def _attend(x: Inputs, b: int, dtype: torch.dtype) -> Tensor:
    """softmax(q·kᵀ/√D)·v of one sequence in `dtype`; (T, Hq, D). One token sees every key."""
    k, v = (t.to(dtype).transpose(0, 1) for t in x.sequence(b))  # (Hkv, S, D)
    heads = (x.case.heads_kv, x.case.heads_q // x.case.heads_kv)
    q = (x.q[b].to(dtype) * x.case.dim**-0.5).unflatten(1, heads).permute(1, 2, 0, 3).flatten(1, 2)  # (Hkv, G·T, D)
    out = (q @ k.mT).softmax(-1) @ v
    return out.unflatten(1, (heads[1], x.case.tokens)).permute(2, 0, 1, 3).flatten(1, 2)


def run_case(case: Case, usable: Sequence[Peer], rounds: int, seed: int) -> dict[str, Any]:
    """Checks and times every peer on one case; one entry of the record's `cases`."""
    device = default_device()
    count = min(MOST_LAYERS, max(1, -(-COLD // case.bytes()))) if device.type == "cuda" else 1
    layers = make_layers(case, device, seed, count)
    want, limit = expected(layers[0])
    results: dict[str, dict[str, Any]] = {}
    samples: dict[str, timing.Sample] = {}
    for peer in usable:
        result = results[peer.name] = {"status": "timed", "reason": None, "error": None, "speed": None}
        try:
            calls = peer.prepare(layers)
            if peer.attends:
                result["error"] = (calls[0]().float() - want).abs().max().item()
                if not result["error"] <= limit:  # also refuses NaN
                    result |= {"status": "wrong", "reason": f"largest error {result['error']:.3g}, allowed {limit:.3g}"}
                    continue
            samples[peer.name] = timing.sample(calls, device)
        except Unsupported as error:
            result |= {"status": "unsupported", "reason": str(error)}
        except Exception as error:  # a broken peer is a line in the report, not the end of the run
            result |= {"status": "failed", "reason": first_line(error)}
    times = timing.interleave(samples, rounds, seed)
    for name, taken in times.items():
        ratio = timing.paired_ratio(taken, times[OWN]).asdict() if OWN in times and name != OWN else None
        summary = timing.Summary.of(taken)
        results[name] |= {
            "mode": samples[name].mode, "note": samples[name].note, "calls": samples[name].calls,
            "ms": summary.asdict(), "tb_s": case.bytes() / (summary.median * 1e9), "speed": ratio,
        }  # fmt: skip
    group = "mla" if case.dim_v else "decode"
    return {"group": group, "case": asdict(case), "bytes": case.bytes(), "sets": count, "results": results}


def render(found: record.Record, ways: str = "peer", ratio_to: str = "x own") -> str:
    """A line for every case and way to compute it: microseconds, TB/s, and its ratio to the way `ratio_to` names."""
    lines = [f"{'case':<26}{ways:<28}{'us':>10}{'TB/s':>8}{ratio_to:>9}"]
    for entry in found["cases"]:
        for name, result in entry["results"].items():
            head = f"{entry['case']['name']:<26}{name:<28}"
            if "ms" not in result:
                lines.append(f"{head}  {result['status']}: {result['reason']}")
                continue
            ratio = f"{result['speed']['median']:9.3f}" if result["speed"] else ""
            lines.append(f"{head}{1000 * result['ms']['median']:10.2f}{result['tb_s']:8.3f}{ratio}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 if warpattn was wrong or failed."""
    argv = sys.argv[1:] if argv is None else list(argv)
    args = _arguments(argv)
    found = record.start("bench.decode", argv, {"rounds": args.rounds, "seed": args.seed})
    usable = []
    for peer in peers(args.peers.split(","), args.variant):
        available = peer.reason is None
        found["peers"][peer.name] = {"available": available, "reason": peer.reason, "version": peer.version}
        usable += [peer] if available else []
    for case in cases() if torch.cuda.is_available() else smoke_cases():
        if args.only not in case.name:
            continue
        found["cases"].append(run_case(case, usable, args.rounds, args.seed))
        if args.json is not None:
            record.write(found, args.json)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    print(render(found), flush=True)
    status = [result["status"] for entry in found["cases"] for name, result in entry["results"].items() if OWN in name]
    return int(any(word in ("wrong", "failed") for word in status))


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = arguments.timed_cases("bench.decode", __doc__)
    every = ",".join(EVERY)
    parser.add_argument("--peers", default=every, help=f"of {every}; default all")
    parser.add_argument("--variant", action="append", default=[], help="fields of the configuration, such as ctas=2")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(arguments.status(main))
