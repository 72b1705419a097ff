"""Times prefill with 8-bit products beside our own 16-bit prefill: `python3 -m bench.eight_bit.prefill --json FILE`.

Each case has q, k and v of bf16 and the same in e4m3 with a scale per head; the latter includes the launch that
transposes the values, which is also timed alone, beside a copy of as many bytes, unless v brings them transposed.
Results are held against fp32 on what is stored. A `--variant` is the 8-bit kernel with other fields of its
configuration. Without a GPU, small cases run with the reference.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import warpattn as wa
from bench.cases import Case, groups
from bench.measure import arguments, inputs, record, timing
from bench.peers.adapter import first_line
from warpattn.kernels.sm90.prefill.choice import usual_config
from warpattn.kernels.sm90.prefill.eight_bit.transpose_launch import transposed
from warpattn.kernels.sm90.prefill.launch import arrange, list_launches
from warpattn.problem import Call, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.operands import Operands
from warpattn.quantized import Quantized
from warpattn.runtime.bound_launches import BoundLaunches
from warpattn.sequences import Dense

SIXTEEN, OWN, ACROSS, COPY = "16-bit", "8-bit", "values across", "copy of values"
BROUGHT = f"{OWN}, v transposed"
NAMES = tuple(f"{dim}-{shape}-{mask}" for mask in ("full", "causal") for dim in ("d128", "d64", "d256")
              for shape in ("1x16k", "16x1k"))  # fmt: skip
LIMIT = 3.5e-2  # relative error: weights have four significant bits
Attention = Callable[[], Tensor]


def own_call(given: tuple[Quantized, ...], mask: wa.Mask | None, fields: dict[str, int]) -> Attention:
    """The kernel with `fields` of its configuration set; without any, and on a CPU, the public call."""
    q, k, v = given
    if not fields or not q.values.is_cuda:
        return partial(wa.attention, q, k, v, mask=mask)  # type: ignore[arg-type]
    sequence = Dense(k.scale, v.scale, q.scale)
    checked = validate(Call(q.values, k.values, v.values, sequence, mask), read_values=False)
    problem = checked.problem
    choice = arrange(problem, ARCHS["sm90"], replace(usual_config(problem, problem.seq_q)[0], **fields), ("given",))
    out = torch.empty(*q.values.shape[:-1], v.values.shape[-1], dtype=torch.bfloat16, device=q.values.device)
    operands = Operands(q.values, k.values, v.values, out, None, None)
    bound = BoundLaunches(list_launches(checked, operands, sequence, choice), q.values.get_device())

    def call() -> Tensor:
        bound.launch()
        return out

    return call


def run_case(case: Case, variants: Sequence[str], rounds: int, seed: int) -> dict[str, Any]:
    """Checks and times every way of one case; one entry of the record's `cases`."""
    device, mask = inputs.default_device(), wa.Causal() if case.causal else None
    wide = inputs.make(case, device, seed)
    given = tuple(wa.quantize(x, per="head") for x in wide)
    brought = (*given[:2], wa.quantize(wide[2], per="head", transposed=True))
    expected = in_fp32(given, case.causal)
    results: dict[str, dict[str, Any]] = {SIXTEEN: {"status": "timed"}}
    calls: dict[str, Callable[[], object]] = {SIXTEEN: partial(wa.attention, *wide, mask=mask)}
    for name in (OWN, BROUGHT, *(f"{OWN} {text}" for text in variants)):
        x, text = (brought, "") if name == BROUGHT else (given, name.removeprefix(OWN).strip())
        try:
            call = own_call(x, mask, _fields(text))
            error = ((call().float() - expected).norm() / expected.norm()).item()
            results[name] = {"status": "timed" if error <= LIMIT else "wrong", "error": error}
            if error <= LIMIT:  # also refuses NaN
                calls[name] = call
        except Exception as problem:  # a broken variant is a line in the report, not the end of the run
            results[name] = {"status": "failed", "reason": first_line(problem)}
    if device.type == "cuda":
        v = given[2].values
        calls[ACROSS] = BoundLaunches(transposed(v)[1], v.get_device()).launch
        calls[COPY] = partial(torch.empty_like(v).copy_, v)
    times = timing.interleave({name: timing.sample([call], device) for name, call in calls.items()}, rounds, seed)
    for name, taken in times.items():
        summary = timing.Summary.of(taken)
        results.setdefault(name, {"status": "timed"})["ms"] = summary.asdict()
        if name.startswith((OWN, SIXTEEN)):
            results[name]["tflops"] = case.tflops(summary.median)
            results[name]["speed"] = timing.paired_ratio(times[SIXTEEN], taken).asdict()
        else:
            results[name]["speed"] = timing.paired_ratio(times[COPY], taken).asdict()
    return {"group": "eight-bit-prefill", "case": case.asdict(), "flops": case.flops(), "results": results}


def in_fp32(given: tuple[Quantized, ...], causal: bool) -> Tensor:
    """Attention on what is stored, by torch."""
    q, k, v = (x.dequantized().transpose(1, 2) for x in given)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def render(found: record.Record) -> str:
    """A line for every case and way: microseconds, TFLOP/s, and its speed, as a multiple of 16 bits' or of a copy's."""
    lines = [f"{'case':<20}{'way':<40}{'us':>10}{'TFLOP/s':>9}{'speed':>8}{'error':>9}"]
    for entry in found["cases"]:
        for name, result in entry["results"].items():
            head = f"{entry['case']['name']:<20}{name:<40}"
            if "ms" not in result:
                lines.append(f"{head}  {result['status']}: {result.get('reason', result.get('error'))}")
                continue
            rate = f"{result['tflops']:9.0f}" if "tflops" in result else f"{'':9}"
            error = f"{result['error']:9.1e}" if "error" in result else ""
            lines.append(f"{head}{1000 * result['ms']['median']:10.1f}{rate}{result['speed']['median']:8.3f}{error}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 if a result was wrong or a way failed."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = arguments.timed_cases("bench.eight_bit.prefill", __doc__, "one of these, comma-separated")
    parser.add_argument("--variant", action="append", default=[], help="fields of the config, such as block_n=64")
    args = parser.parse_args(argv)
    found = record.start("bench.eight_bit.prefill", argv, {"rounds": args.rounds, "seed": args.seed})
    every = {case.name: case for group in groups().values() for case in group}
    chosen = [every[name] for name in NAMES] if torch.cuda.is_available() else groups()["smoke"][:2]
    for case in chosen:
        if any(part in case.name for part in args.only.split(",")):
            found["cases"].append(run_case(case, args.variant, args.rounds, args.seed))
            if args.json is not None:
                record.write(found, args.json)
    print(render(found), flush=True)
    return int(any(r["status"] != "timed" for entry in found["cases"] for r in entry["results"].values()))


def _fields(text: str) -> dict[str, int]:
    """The fields of a variant."""
    return {key: int(value) for key, value in (part.split("=") for part in text.split(",") if part)}


if __name__ == "__main__":
    sys.exit(arguments.status(main))
