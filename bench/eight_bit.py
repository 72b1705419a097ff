"""Times decode over 8-bit keys and values beside our own 16-bit decode: `python3 -m bench.eight_bit --json FILE`.

The cases are some of `bench.decode`, each with keys and values of 16 bits and the same in e4m3, with one scale for all
heads and with one for each token of a head; calls take turns, and layers are cold, as there. All are held against fp32
on what is stored. A `--variant` is the 8-bit kernel with other fields of its configuration. Without a GPU, two small
cases run with the reference.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import warpattn as wa
from bench import record, timing
from bench.decode import COLD, MOST_LAYERS, expected, render
from bench.decode_cases import Case, Inputs, make_layers
from bench.decode_own import own_calls
from bench.inputs import default_device
from bench.peers.adapter import first_line

OWN, TOKENS, SIXTEEN = "8-bit", "8-bit, token scales", "16-bit"
KI = 1024
CASES = (
    *(Case(f"{kind}{batch}x{keys}k-{heads}/{kv}", (keys * KI,) * batch, heads, kv, page)
      for kind, page in (("page16-", 16), ("dense-", 0))
      for batch, keys, heads, kv in ((32, 16, 32, 8), (64, 8, 64, 8), (128, 4, 32, 8), (8, 8, 32, 8), (32, 4, 32, 8),
                                     (1, 16, 32, 8), (1, 128, 32, 8))),
    Case("page16-32x8k-64/8-d64", (8 * KI,) * 32, 64, 8, 16, dim=64),
    Case("page16-16x8k-16/8-d256", (8 * KI,) * 16, 16, 8, 16, dim=256),
)  # fmt: skip
SMOKE = (Case("smoke-dense", (512, 512), 8, 2, dim=64), Case("smoke-page16", (300, 77, 1), 8, 2, 16, dim=64))


def in_eight_bits(x: Inputs, by_token: bool) -> Inputs:
    """The same step with keys and values of e4m3. Scales that a card's memory holds; keys and values have the same."""
    scale = torch.full(x.k.shape[:-1] if by_token else (), 1 / 64, device=x.q.device)
    k, v = (wa.quantize(t, scale=scale[:1].flatten()[0] if by_token else scale).values for t in (x.k, x.v))
    return replace(x, case=replace(x.case, kv_dtype="float8_e4m3fn"), k=k, v=v, scale=scale)


def stored(x: Inputs) -> Inputs:
    """Keys and values as they are stored, in fp32."""
    return x if x.scale is None else replace(x, k=x.k.float() / 64, v=x.v.float() / 64)


def run_case(case: Case, variants: Sequence[str], rounds: int, seed: int) -> dict[str, Any]:
    """Checks and times 16 bits, 8 bits and variants on one case; one entry of the record's `cases`."""
    device = default_device()
    count = min(MOST_LAYERS, max(1, -(-2 * COLD // case.bytes()))) if device.type == "cuda" else 1
    wide = make_layers(case, device, seed, count)
    narrow, tokens = [[in_eight_bits(x, by_token) for x in wide] for by_token in (False, True)]
    ways = {SIXTEEN: (wide, ""), OWN: (narrow, ""), TOKENS: (tokens, "")}
    ways |= {f"{OWN} {text}": (narrow, text) for text in variants}
    results: dict[str, dict[str, Any]] = {}
    samples: dict[str, timing.Sample] = {}
    for name, (layers, text) in ways.items():
        result = results[name] = {"status": "timed", "reason": None, "error": None, "speed": None}
        try:
            want, limit = expected(stored(layers[0]))
            calls = own_calls(layers, _fields(text))
            result["error"] = (calls[0]().float() - want).abs().max().item()
            if not result["error"] <= limit:  # also refuses NaN
                result |= {"status": "wrong", "reason": f"largest error {result['error']:.3g}, allowed {limit:.3g}"}
                continue
            samples[name] = timing.sample(calls, device)
        except Exception as error:  # a broken variant is a line in the report, not the end of the run
            result |= {"status": "failed", "reason": first_line(error)}
    times = timing.interleave(samples, rounds, seed)
    for name, taken in times.items():
        summary, own = timing.Summary.of(taken), ways[name][0][0].case
        ratio = timing.paired_ratio(times[SIXTEEN], taken).asdict() if SIXTEEN in times and name != SIXTEEN else None
        results[name] |= {"ms": summary.asdict(), "tb_s": own.bytes() / (summary.median * 1e9), "speed": ratio}
    return {"group": "eight-bit", "case": asdict(case), "bytes": case.bytes(), "sets": count, "results": results}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 if a result was wrong or a way failed."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="python -m bench.eight_bit", description=__doc__)
    parser.add_argument("--variant", action="append", default=[], help="fields of the configuration, such as ctas=2")
    parser.add_argument("--only", default="", help="keep only cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=20, help="recorded rounds per case")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs and the order within a round")
    parser.add_argument("--json", type=Path, help="write the record here (after every case)")
    args = parser.parse_args(argv)
    found = record.start("bench.eight_bit", argv, {"rounds": args.rounds, "seed": args.seed})
    cases = CASES if torch.cuda.is_available() else SMOKE
    for case in filter(partial(_named, args.only), cases):
        found["cases"].append(run_case(case, args.variant, args.rounds, args.seed))
        if args.json is not None:
            record.write(found, args.json)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    print(render(found, "way", "x 16-bit"), flush=True)
    return int(any(r["status"] != "timed" for entry in found["cases"] for r in entry["results"].values()))


def _fields(text: str) -> dict[str, int]:
    """The fields of a variant."""
    return {key: int(value) for key, value in (part.split("=") for part in text.split(",") if part)}


def _named(part: str, case: Case) -> bool:
    return part in case.name


if __name__ == "__main__":
    sys.exit(main())
