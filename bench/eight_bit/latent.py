"""Times latent attention over 8-bit latents beside 16-bit ones: `python3 -m bench.eight_bit.latent --json FILE`.

One query token, pages of 64, a cache in DeepSeek's form (656 bytes a token), and the same in bf16 (1,152 bytes). The
result of 8 bits is held against that of 16 bits on what is stored, rounded to bf16. Up to 16 heads, where queries are
the right operands of 8-bit latents, are timed with one attending warpgroup and with tiles of 64 rows, too, which no
plan chooses. Without a GPU, a small case runs with the reference.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import warpattn as wa
from bench.eight_bit.running import run_cases
from bench.measure import inputs, record, timing
from bench.measure.arguments import status
from warpattn.kernels.sm90.mla.config import choose, takes_swap_ab
from warpattn.kernels.sm90.mla.launch import list_launches
from warpattn.problem import Call, CheckedCall, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.launch import Choice
from warpattn.problem.operands import Operands
from warpattn.runtime.bound_launches import BoundLaunches
from warpattn.sequences.latent import LATENT, TOKEN_BYTES

SIXTEEN, OWN = "16-bit", "8-bit"
ONE_WARPGROUP = {"warpgroups": 1, "block_n": 64, "stages": 8}  # that attends, instead of two
DIM, PAGE, SCALE = 576, 64, 192**-0.5
LIMIT = 2e-2  # largest error over the largest result


class Case(NamedTuple):
    """Sequences of so many keys, with so many query heads on one latent."""

    batch: int
    keys: int
    heads: int

    @property
    def name(self) -> str:
        return f"{self.batch}x{self.keys}-{self.heads}"


CASES = (
    *(Case(128, 4096, 16), Case(32, 16384, 16), Case(8, 8192, 16), Case(256, 4096, 16), Case(64, 8192, 16)),
    *(Case(16, 32768, 16), Case(128, 1024, 16), Case(1, 131072, 16), Case(128, 4096, 128), Case(32, 4096, 128)),
)
SMOKE = (Case(2, 128, 16),)


def caches(case: Case, seed: int) -> tuple[Tensor, wa.LatentPages, wa.PagedKV]:
    """Queries, latents of 8 bits, and the same of 16 bits."""
    device = inputs.default_device()
    torch.manual_seed(seed)
    pages = case.batch * case.keys // PAGE
    table = torch.randperm(pages, device=device).int().view(case.batch, -1)
    lengths = torch.full((case.batch,), case.keys, dtype=torch.int32, device=device)
    bytes_ = torch.empty(pages, PAGE, 1, TOKEN_BYTES, dtype=torch.uint8, device=device)
    narrow = wa.LatentPages.of_bytes(bytes_, table, lengths)
    wide = torch.randn(pages, PAGE, 1, DIM, device=device).bfloat16()
    stored = wa.quantize(wide[..., :LATENT], per=128)
    narrow.k_pages.view(torch.uint8).copy_(stored.values.view(torch.uint8))
    assert narrow.k_scale is not None
    narrow.k_scale.copy_(stored.scale)
    narrow.rope.copy_(wide[..., LATENT:])
    wide[..., :LATENT] = stored.dequantized()
    q = torch.randn(case.batch, 1, case.heads, DIM, device=device).bfloat16()
    return q, narrow, wa.PagedKV(wide, wide[..., :LATENT], table, lengths)


def other_calls(q: Tensor, kv: wa.LatentPages) -> dict[str, Callable[[], Tensor]]:
    """Calls with configurations that no plan chooses, by their names; none where it has no choice, or no card."""
    ready = validate(Call(q, kv.k_pages, kv.v_pages, kv, scale=SCALE, backend="reference"), read_values=False)
    if q.device.type == "cpu" or not takes_swap_ab(ready.problem):
        return {}
    choose_on = partial(choose, ready.problem, ARCHS["sm90"])
    both = choose_on(swap_ab=True)
    alone = replace(both, config=replace(both.config, **ONE_WARPGROUP))
    choices = {OWN + " 1 warpgroup": alone, OWN + " 64 rows": choose_on(swap_ab=False)}
    return {name: call_of(q, kv, ready, choice) for name, choice in choices.items()}


def call_of(q: Tensor, kv: wa.LatentPages, ready: CheckedCall, choice: Choice) -> Callable[[], Tensor]:
    """A checked call with a configuration of one's own."""
    out = q.new_empty((*q.shape[:3], LATENT))
    operands = Operands(q, kv.k_pages, kv.v_pages, out, None, None)
    launches = list_launches(ready, operands, kv, choice)
    bound = BoundLaunches(launches, out.get_device())

    def call() -> Tensor:
        bound.launch()
        return out

    return call


def run_case(case: Case, rounds: int, seed: int) -> dict[str, Any]:
    """Checks and times both ways; one entry of the record's `cases`."""
    device = inputs.default_device()
    q, narrow, wide = caches(case, seed)
    both = ((SIXTEEN, wide), (OWN, narrow))
    calls: dict[str, Callable[[], Tensor]] = {
        name: partial(wa.attention_paged, q, kv, scale=SCALE) for name, kv in both
    }
    calls |= other_calls(q, narrow)
    want = calls[SIXTEEN]().float()
    results: dict[str, dict[str, Any]] = {SIXTEEN: {"status": "timed"}}
    for name in (name for name in calls if name != SIXTEEN):
        error = ((calls[name]().float() - want).abs().max() / want.abs().max()).item()
        results[name] = {"status": "timed" if error <= LIMIT else "wrong", "error": error}  # wrong also for NaN
    times = timing.interleave({name: timing.sample([call], device) for name, call in calls.items()}, rounds, seed)
    for name in calls:
        size = TOKEN_BYTES if name.startswith(OWN) else 2 * DIM
        summary = timing.Summary.of(times[name])
        ratio = timing.paired_ratio(times[SIXTEEN], times[name]).asdict()
        rate = case.batch * case.keys * size / (summary.median * 1e9)
        results[name] |= {"ms": summary.asdict(), "tb_s": rate, "speed": ratio}
    return {"group": "latent", "case": case._asdict() | {"name": case.name}, "results": results}


def render(found: record.Record) -> str:
    """A line for every case and way: microseconds, TB/s of the cache, 16-bit time over its own, and its error."""
    lines = [f"{'case':<18}{'way':<20}{'us':>9}{'TB/s':>7}{'x 16-bit':>10}{'error':>9}"]
    for entry in found["cases"]:
        for name, result in entry["results"].items():
            head = f"{entry['case']['name']:<18}{name:<20}{1000 * result['ms']['median']:9.1f}{result['tb_s']:7.2f}"
            error = f"{result['error']:9.1e} {result['status']}" if "error" in result else ""
            lines.append(f"{head}{result['speed']['median']:10.3f}{error}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 if a result was wrong."""
    cases = {case.name: partial(run_case, case) for case in (CASES if torch.cuda.is_available() else SMOKE)}
    return run_cases("bench.eight_bit.latent", __doc__, argv, cases, render)


if __name__ == "__main__":
    sys.exit(status(main))
