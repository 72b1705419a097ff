"""Times attention over 8-bit keys and values beside our own over 16 bits: `python3 -m bench.eight_bit --json FILE`.

The cases of decode are some of `bench.decode`, each with keys and values of 16 bits and the same in 8, with one scale
for all heads and with one for each token of a head, which is next to those of the other heads or of the other tokens;
calls take turns, and layers are cold, as there. All are held against fp32 on what is stored. A `--variant` is the 8-bit
kernel with other fields of its configuration. The cases of prefill are causal and held against the 16-bit kernel on the
same values. Without a GPU, small cases run with the reference.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

import warpattn as wa
from bench.decode.__main__ import COLD, MOST_LAYERS, expected, render
from bench.decode.cases import Case, Inputs, make_layers
from bench.decode.own import own_calls, sequence_of
from bench.measure import arguments, record, timing
from bench.measure.inputs import default_device
from bench.peers.adapter import first_line
from warpattn.cli.spelling import STORED_HELP, stored

OWN, TOKENS, ADJACENT, SIXTEEN = "8-bit", "8-bit, token scales", "8-bit, adjacent token scales", "16-bit"
NARROW = (OWN, TOKENS, ADJACENT)
KI = 1024
CASES = (
    *(Case(f"{kind}{batch}x{keys}k-{heads}/{kv}", (keys * KI,) * batch, heads, kv, page)
      for kind, page in (("page16-", 16), ("dense-", 0))
      for batch, keys, heads, kv in ((32, 16, 32, 8), (64, 8, 64, 8), (128, 4, 32, 8), (8, 8, 32, 8), (32, 4, 32, 8),
                                     (1, 16, 32, 8), (1, 128, 32, 8))),
    Case("page16-32x8k-64/8-d64", (8 * KI,) * 32, 64, 8, 16, dim=64),
    Case("page16-16x8k-16/8-d256", (8 * KI,) * 16, 16, 8, 16, dim=256),
)  # fmt: skip
PREFILL = (
    *(Case(f"prefill-{batch}x{queries}/{keys}-{dtype}", (keys,) * batch, 32, 8, 16, queries, dtype=dtype)
      for batch, queries, keys in ((1, 16 * KI, 16 * KI), (4, 4 * KI, 4 * KI), (16, KI, KI), (1, 2 * KI, 32 * KI),
                                   (4, 512, 8 * KI))
      for dtype in ("bfloat16", "float16")),
    Case("prefill-dense-1x16384-bfloat16", (16 * KI,), 16, 16, tokens=16 * KI),
    *(Case(f"prefill-d{dim}-4x4096-{dtype}", (4 * KI,) * 4, heads, 8, 16, 4 * KI, dim, dtype)
      for dim, heads in ((64, 64), (192, 16), (256, 16)) for dtype in ("bfloat16", "float16")),
)  # fmt: skip
SMOKE = (
    Case("smoke-dense", (512, 512), 8, 2, dim=64),
    Case("smoke-page16", (300, 77, 1), 8, 2, 16, dim=64),
    Case("prefill-smoke", (40, 40), 4, 2, 8, 40, dim=64),
)


def in_eight_bits(x: Inputs, way: str, dtype: torch.dtype) -> Inputs:
    """The same step in 8 bits. Scales that a card's memory holds; keys and values have the same."""
    one = torch.full((), 1 / 64, device=x.q.device)
    outer, rows, heads, _ = x.k.shape
    adjacent = one.repeat(outer, heads, rows).transpose(1, 2)
    scale = {OWN: one, TOKENS: one.repeat(outer, rows, heads), ADJACENT: adjacent}[way]
    k, v = (wa.quantize(t, dtype, scale=one).values for t in (x.k, x.v))
    return replace(x, case=replace(x.case, kv_dtype=str(dtype).removeprefix("torch.")), k=k, v=v, scale=scale)


def as_stored(x: Inputs) -> Inputs:
    """Keys and values as they are stored, in fp32."""
    return x if x.scale is None else replace(x, k=x.k.float() / 64, v=x.v.float() / 64)


def prefill_calls(x: Inputs) -> list[Callable[[], Any]]:
    """Causal attention of as many queries as the case has tokens."""
    sequence, out = sequence_of(x), torch.empty_like(x.q)
    if isinstance(sequence, wa.PagedKV):
        return [lambda: wa.attention_paged(x.q, sequence, mask=wa.Causal(), out=out)]
    k, v = (t if x.scale is None else wa.Quantized(t, x.scale) for t in (x.k, x.v))
    return [lambda: wa.attention(x.q, k, v, mask=wa.Causal(), out=out)]


def run_prefill(case: Case, dtype: torch.dtype, rounds: int, seed: int) -> dict[str, Any]:
    """The same for a case of prefill, whose 16-bit keys and values are the 8-bit ones."""
    device = default_device()
    drawn = make_layers(case, device, seed, 1)[0]
    kinds = (OWN,) if case.dtype == "float16" else NARROW  # fp16 does not hold weights times any scale
    narrow = {way: in_eight_bits(drawn, way, dtype) for way in kinds}
    k, v = ((x.float() / 64).to(drawn.q.dtype) for x in (narrow[OWN].k, narrow[OWN].v))
    ways = {SIXTEEN: replace(drawn, k=k, v=v), **narrow}
    calls = {name: prefill_calls(x) for name, x in ways.items()}
    want = calls[SIXTEEN][0]().float()
    limit = 8 * torch.finfo(drawn.q.dtype).eps * want.abs().max().item()
    results: dict[str, dict[str, Any]] = {}
    for name, (call,) in calls.items():
        error = (call().float() - want).abs().max().item()
        right = error <= limit  # not so for NaN
        reason = None if right else f"largest error {error:.3g}, allowed {limit:.3g}"
        results[name] = {"status": "timed" if right else "wrong", "reason": reason, "error": error, "speed": None}
    times = timing.interleave({name: timing.sample(each, device) for name, each in calls.items()}, rounds, seed)
    for name, taken in times.items():
        summary, size = timing.Summary.of(taken), ways[name].case.bytes()
        ratio = timing.paired_ratio(times[SIXTEEN], taken).asdict() if name != SIXTEEN else None
        results[name] |= {"ms": summary.asdict(), "tb_s": size / (summary.median * 1e9), "speed": ratio}
    return {"group": "eight-bit", "case": asdict(case), "bytes": case.bytes(), "sets": 1, "results": results}


def run_case(case: Case, variants: Sequence[str], dtype: torch.dtype, rounds: int, seed: int) -> dict[str, Any]:
    """Checks and times 16 bits, 8 bits and variants on one case; one entry of the record's `cases`."""
    device = default_device()
    count = min(MOST_LAYERS, max(1, -(-2 * COLD // case.bytes()))) if device.type == "cuda" else 1
    wide = make_layers(case, device, seed, count)
    narrow = {way: [in_eight_bits(x, way, dtype) for x in wide] for way in NARROW}
    ways = {SIXTEEN: (wide, "")} | {way: (layers, "") for way, layers in narrow.items()}
    ways |= {f"{OWN} {text}": (narrow[OWN], text) for text in variants}
    results: dict[str, dict[str, Any]] = {}
    samples: dict[str, timing.Sample] = {}
    for name, (layers, text) in ways.items():
        result = results[name] = {"status": "timed", "reason": None, "error": None, "speed": None}
        try:
            want, limit = expected(as_stored(layers[0]))
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
    parser = arguments.timed_cases("bench.eight_bit", __doc__)
    parser.add_argument("--variant", action="append", default=[], help="fields of the configuration, such as ctas=2")
    parser.add_argument("--kv-dtype", default="fp8", help=f"of keys and values: {STORED_HELP}")
    args = parser.parse_args(argv)
    found = record.start("bench.eight_bit", argv, {"rounds": args.rounds, "seed": args.seed})
    dtype = stored(args.kv_dtype) or torch.float8_e4m3fn
    for case in filter(partial(_named, args.only), CASES + PREFILL if torch.cuda.is_available() else SMOKE):
        if case.name.startswith("prefill"):
            found["cases"].append(run_prefill(case, dtype, args.rounds, args.seed))
        else:
            found["cases"].append(run_case(case, args.variant, dtype, args.rounds, args.seed))
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
    sys.exit(arguments.status(main))
