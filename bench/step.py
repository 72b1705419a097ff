"""Steps of an engine: writing the cache, decoding by a step plan, prompts beside decoding requests.

`python -m bench.step` prints microseconds of a call within a CUDA graph: `append_slots` beside a copy of as many bytes,
a `StepPlan` beside a `DecodePlan`, a mixed step beside its parts alone, steps over caches of 16 and 8 bits without and
with (+) a workspace for copies of keys, a prefix that all requests share, read by each and read once (cascade), and
`merge_states` beside a copy. Llama-3-8B's heads, pages of 16 as vLLM has them. Compile first: the first run of a kernel
takes seconds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import warpattn as wa
from bench.measure.arguments import positive, require_card, status
from bench.measure.machine import describe
from bench.measure.record import save
from bench.measure.timing import DeviceSample, Summary, interleave, paired_ratio
from warpattn.problem.memory import COPIED_BYTES
from warpattn.sequences import PagedKV, Ragged

HEADS, HEADS_KV, DIM, PAGE = 32, 8, 128, 16


class Heads(NamedTuple):
    """Heads of queries and of keys, and their columns."""

    q: int = HEADS
    kv: int = HEADS_KV
    dim: int = DIM


LLAMA, GPT_OSS = Heads(), Heads(64, 8, 64)
COPIES = 4  # of a cache, used in turn


def ints(values: list[int]) -> torch.Tensor:
    """int32 on the card."""
    return torch.tensor(values, dtype=torch.int32, device="cuda")


class Step:
    """A step: queries and keys of each sequence, over a cache of its own."""

    def __init__(self, queries: list[int], keys: list[int], heads: Heads = LLAMA) -> None:
        width = -(-max(keys) // PAGE)
        used = len(keys) * width
        self.cache = torch.randn(used + 1, PAGE, heads.kv, 2 * heads.dim, device="cuda", dtype=torch.bfloat16)
        pages = self.cache.split(heads.dim, -1)
        table = torch.randperm(used, device="cuda")[:used].reshape(len(keys), width).int() + 1
        self.kv = PagedKV(*pages, table, ints(keys))
        self.seq = Ragged(ints([0, *torch.tensor(queries).cumsum(0).tolist()]))
        self.q = torch.randn(sum(queries), heads.q, heads.dim, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty_like(self.q)

    def planned(self, max_q: int | None, workspace: torch.Tensor | None = None) -> Callable[[], Any]:
        """A call of a plan made for this step."""
        seq = Ragged(self.seq.cu_q, max_q=max_q)
        plan = wa.StepPlan(self.q, self.kv, seq, mask=wa.Causal(), workspace=workspace)
        return lambda: plan(self.q, self.kv, self.seq, self.out)

    def in_eight_bits(self, per: str) -> Step:
        """The same step over e4m3, with one scale or one for each token and head."""
        narrow, pages = copy(self), self.cache.to(torch.float8_e4m3fn).chunk(2, -1)
        scale = torch.ones(() if per == "tensor" else pages[0].shape[:-1], device="cuda")
        narrow.kv = replace(self.kv, k_pages=pages[0], v_pages=pages[1], k_scale=scale, v_scale=scale)
        return narrow

    def uniform(self) -> Callable[[], Any]:
        """A `DecodePlan` of the same, for one query a sequence."""
        q, out = self.q[:, None], self.out[:, None]
        plan = wa.DecodePlan(q, self.kv, mask=wa.Causal())
        return lambda: plan(q, self.kv, out)


def appends(tokens: int) -> dict[str, list[Callable[[], Any]]]:
    """`append_slots` of so many tokens, and torch's copy of as many bytes."""
    calls: dict[str, list[Callable[[], Any]]] = {"append_slots": [], "copy": []}
    for _ in range(COPIES if tokens > 4096 else 1):
        pages = max(tokens // PAGE * 2, 64)
        cache = torch.randn(pages, PAGE, HEADS_KV, 2 * DIM, device="cuda", dtype=torch.bfloat16)
        k_pages, v_pages = cache.split(DIM, -1)
        k, v = torch.randn(2, tokens, HEADS_KV, DIM, device="cuda", dtype=torch.bfloat16)
        run = torch.arange(tokens, device="cuda")
        slots = torch.randperm(pages, device="cuda")[run // PAGE] * PAGE + run % PAGE
        both = torch.randn(2, tokens, HEADS_KV, DIM, device="cuda", dtype=torch.bfloat16)
        target = torch.empty_like(both)
        calls["append_slots"].append(lambda a=(k, v, k_pages, v_pages, slots): wa.append_slots(*a))
        calls["copy"].append(lambda a=target, b=both: a.copy_(b))
    return calls


def decodes(batch: int, keys: int) -> dict[str, list[Callable[[], Any]]]:
    """One new token of each of `batch` sequences: by both plans, and by the plan of any step."""
    steps = [Step([1] * batch, [keys] * batch) for _ in range(COPIES if batch * keys < 100_000 else 2)]
    return {
        "step_plan": [step.planned(1) for step in steps],
        "decode_plan": [step.uniform() for step in steps],
        "any_step": [step.planned(None) for step in steps],
    }


def mixed(batch: int, keys: int, prompts: list[tuple[int, int]]) -> dict[str, list[Callable[[], Any]]]:
    """Decoding sequences beside (queries, keys) of prompts, and each part alone."""
    queries, lengths = [list(x) for x in zip(*prompts, strict=True)]
    whole = Step([1] * batch + queries, [keys] * batch + lengths)
    few, many = Step([1] * batch, [keys] * batch), Step(queries, lengths)
    return {"mixed": [whole.planned(None)], "decode": [few.planned(1)], "prefill": [many.planned(None)]}


def copied(
    batch: int, keys: int, prompts: list[tuple[int, int]], heads: Heads = LLAMA
) -> dict[str, list[Callable[[], Any]]]:
    """A mixed step over 16 bits and 8 bits, each without and with a workspace for copies of keys. Outputs must not
    differ by more than rounding."""
    queries, lengths = [list(x) for x in zip(*prompts, strict=True)]
    wide = Step([1] * batch + queries, [keys] * batch + lengths, heads)
    wide.cache.copy_(wide.cache.to(torch.float8_e4m3fn))
    workspace = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    calls = {}
    for name, step in {"16": wide, **{per: wide.in_eight_bits(per) for per in ("tensor", "token")}}.items():
        calls |= {name: step.planned(None), f"{name}+": step.planned(None, workspace)}
    want = calls["16"]().clone()
    for name, call in calls.items():
        torch.testing.assert_close(call(), want, atol=2e-2, rtol=2e-2, msg=lambda text, name=name: f"{name}: {text}")
    return {name: [call] for name, call in calls.items()}


def shared(batch: int, prefix: int, own: int) -> dict[str, list[Callable[[], Any]]]:
    """One new token of each of `batch` sequences with `prefix` keys in common: each on its own, and cascaded."""
    step, pages = Step([1] * batch, [prefix + own] * batch), prefix // PAGE
    step.kv.block_table[:, :pages] = step.kv.block_table[0, :pages]
    promised = replace(step.kv, shared_pages=pages)
    tail: dict[str, Any] = {"mask": wa.Causal(), "out": step.out}
    return {
        "each": [lambda: wa.attention_paged(step.q, step.kv, step.seq, **tail)],
        "each_planned": [step.planned(1)],
        "cascade": [lambda: wa.attention_paged(step.q, promised, step.seq, **tail)],
    }


def merges(rows: int) -> dict[str, list[Callable[[], Any]]]:
    """`merge_states` of two results, and torch's copy of as many bytes as it reads and writes."""
    outs = torch.randn(3, rows, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    lses = torch.randn(2, HEADS, rows, device="cuda")
    half = torch.empty(3 * rows * HEADS * DIM // 2, device="cuda", dtype=torch.bfloat16)
    other = torch.empty_like(half)
    return {
        "merge_states": [lambda: wa.merge_states(outs[0], lses[0], outs[1], lses[1], out=outs[2])],
        "copy": [lambda: half.copy_(other)],
    }


CASES: dict[str, Callable[[], dict[str, list[Callable[[], Any]]]]] = {
    "append 1": lambda: appends(1),
    "append 32": lambda: appends(32),
    "append 256": lambda: appends(256),
    "append 8k": lambda: appends(8192),
    "append 128k": lambda: appends(131072),
    "decode 1 x 4k": lambda: decodes(1, 4096),
    "decode 32 x 4k": lambda: decodes(32, 4096),
    "decode 1 x 32k": lambda: decodes(1, 32000),
    "decode 128 x 1k": lambda: decodes(128, 1024),
    "mixed 32 x 4k, 2 chunks": lambda: mixed(32, 4096, [(2048, 4096), (2048, 2048)]),
    "mixed 64 x 2k, 1 chunk": lambda: mixed(64, 2048, [(512, 8192)]),
    "copied 1 x 8k of 32k": lambda: copied(0, 1, [(8192, 32768)]),
    "copied 1 x 8k": lambda: copied(0, 1, [(8192, 8192)]),
    "copied 4 x 2k of 8k": lambda: copied(0, 1, [(2048, 8192)] * 4),
    "copied 2k of 16k, 32 x 4k": lambda: copied(32, 4096, [(2048, 16384)]),
    "copied 8 x 512 of 8k, 64 x 2k": lambda: copied(64, 2048, [(512, 8192)] * 8),
    "copied 16 x 256 of 4k": lambda: copied(0, 1, [(256, 4096)] * 16),
    "copied 32 x 4k, 1 x 64": lambda: copied(32, 4096, [(64, 4096)]),
    "copied d64 1 x 8k of 32k": lambda: copied(0, 1, [(8192, 32768)], GPT_OSS),
    "copied d64 4 x 2k of 8k": lambda: copied(0, 1, [(2048, 8192)] * 4, GPT_OSS),
    "copied d64 8 x 512 of 8k": lambda: copied(0, 1, [(512, 8192)] * 8, GPT_OSS),
    "shared 64 x 16k": lambda: shared(64, 16384, 256),
    "shared 16 x 16k": lambda: shared(16, 16384, 256),
    "shared 64 x 2k": lambda: shared(64, 2048, 256),
    "merge 64": lambda: merges(64),
    "merge 16k": lambda: merges(16384),
}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=list(CASES), help="one or more; default: all")
    parser.add_argument("--rounds", type=positive, default=11)
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args()
    require_card(parser, "steps")
    record: dict[str, Any] = {"machine": describe(), "rounds": args.rounds, "cases": {}}
    for name in args.case or CASES:
        samples = {key: DeviceSample(calls) for key, calls in CASES[name]().items()}
        times = interleave(samples, args.rounds, seed=0)
        first = next(iter(times))
        record["cases"][name] = {
            key: {
                "us": 1000 * Summary.of(ms).median,
                "ratio": paired_ratio(ms, times[first]).median,
                "mode": samples[key].mode,
            }
            for key, ms in times.items()
        }
        shown = "   ".join(f"{key} {x['us']:8.2f} us ({x['ratio']:.3f})" for key, x in record["cases"][name].items())
        print(f"{name:26s}{shown}", flush=True)
        torch.cuda.empty_cache()
    save(record, args.json)


if __name__ == "__main__":
    sys.exit(status(main))
