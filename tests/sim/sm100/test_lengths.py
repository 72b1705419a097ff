"""Ragged and paged batches on the simulated Blackwell kernel: right, clean, and blind to what lies past an end.

Rows and pages of no sequence and the tails of last pages hold NaN; table entries past a
sequence's length point outside of the cache.
"""

import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from tests.drawn import in_turn
from warpattn.kernels.sm100.prefill_2q.config import choose_2q
from warpattn.kernels.sm100.select import launches_of_choice
from warpattn.problem import Call, validate
from warpattn.problem.operands import Operands, fitted
from warpattn.runtime import simulate

SCHEDULES = [("eager", 0), ("lazy", 0), ("adversarial", 0), ("random", 1)]
NAN = float("nan")


def ragged(queries, keys, heads, heads_kv, dim, dtype=torch.float16):
    """(q, k, v, Ragged) of sequences with these lengths."""
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (queries, keys))
    q = torch.randn(sum(queries), heads, dim).to(dtype)
    k, v = (torch.randn(sum(keys), heads_kv, dim).to(dtype) for _ in range(2))
    return q, k, v, wa.Ragged(cu_q, cu_k)


def paged(lengths, rows, heads, heads_kv, dim, page, dtype=torch.float16):
    """(q, PagedKV) with shuffled pages, NaN wherever no key is, and a table that points outside past the lengths."""
    used = [-(-length // page) for length in lengths]
    pages = sum(used) + 3
    k, v = (torch.full((pages, page, heads_kv, dim), NAN).to(dtype) for _ in range(2))
    free = torch.randperm(pages).tolist()
    table = torch.full((len(lengths), max(used) + 2), 10**6, dtype=torch.int32)
    for b, length in enumerate(lengths):
        for p in range(used[b]):
            table[b, p] = free.pop()
            rest = min(page, length - p * page)
            for cache in (k, v):
                cache[table[b, p], :rest] = torch.randn(rest, heads_kv, dim).to(dtype)
    q = torch.randn(len(lengths), rows, heads, dim).to(dtype)
    return q, wa.PagedKV(k, v, table, torch.tensor(lengths, dtype=torch.int32))


def check(call: Call, schedule: str, seed: int) -> None:
    """One call against the reference: output, LSE, findings."""
    ready = validate(call)
    shape = (*call.q.shape[:-1], ready.problem.dim_v)
    out, lse = torch.full(shape, NAN, dtype=call.q.dtype), torch.full(ready.lse_shape, NAN)
    named = call.sequence.operands(call.q, call.k, call.v)
    q, k, v = named.values()
    x = fitted(Operands(q, k, v, out, lse, call.sinks))
    (step,) = launches_of_choice(ready, x, call.sequence, choose_2q(ready.problem))
    report = simulate.run_launch(step, simulate.Options(schedule, seed))
    assert report.clean, report
    options = {"mask": call.mask, "score": call.score, "sinks": call.sinks, "return_lse": True, "backend": "reference"}
    if isinstance(call.sequence, wa.Ragged):
        expected, expected_lse = wa.attention_varlen(q, k, v, call.sequence, **options)
    else:
        expected, expected_lse = wa.attention_paged(q, call.sequence, **options)
    torch.testing.assert_close(out, expected, atol=4e-3 if q.dtype == torch.float16 else 3e-2, rtol=0)
    torch.testing.assert_close(lse, expected_lse, atol=1e-4, rtol=0)


def call(sequences, **options) -> Call:
    *qkv, sequence = sequences
    q, k, v = qkv if len(qkv) == 3 else (*qkv, *qkv, *qkv)
    return Call(q, k, v, sequence, return_lse=True, backend="simulate:sm100", **options)


RAGGED = {
    "causal": lambda: call(ragged([100, 1, 300], [100, 50, 310], 2, 2, 64), mask=wa.Causal()),
    "full-128": lambda: call(ragged([129, 2], [65, 127], 2, 1, 128)),
    "without-queries-or-keys": lambda: call(ragged([100, 0, 130, 5], [100, 50, 0, 7], 4, 1, 128)),
    "fused-heads": lambda: call(ragged([70, 33], [70, 200], 8, 1, 64), mask=wa.Causal(), sinks=torch.randn(8)),
    "window-bf16": lambda: call(ragged([64, 63], [64, 200], 2, 2, 80, torch.bfloat16), mask=wa.SlidingWindow(40)),
    "score": lambda: call(ragged([30, 200], [30, 200], 4, 2, 64), mask=wa.Causal(), score=wa.ALiBi(4)),
}
PAGED = {
    "small-pages": lambda: call(paged([150, 37, 0], 20, 2, 2, 64, 16), mask=wa.Causal()),
    "half-a-tile": lambda: call(paged([300, 129], 140, 4, 1, 128, 64)),
    "two-tiles": lambda: call(paged([600, 129], 140, 2, 1, 128, 256), mask=wa.Causal(), sinks=torch.randn(2)),
    "48-keys": lambda: call(paged([200, 1], 30, 2, 1, 96, 48)),
    "8-keys": lambda: call(paged([200, 1], 30, 2, 1, 64, 8), mask=wa.SlidingWindow(60)),
    "384-keys": lambda: call(paged([1000, 127], 30, 8, 1, 64, 384, torch.bfloat16)),
    "score": lambda: call(paged([128, 65], 30, 4, 1, 64, 32), mask=wa.Causal(), score=wa.SoftCap(5.0)),
    "1-key": lambda: call(paged([150, 0, 37], 20, 2, 2, 64, 1), mask=wa.Causal()),
    "2-keys": lambda: call(paged([129, 2], 140, 4, 1, 128, 2)),
    "3-keys": lambda: call(paged([200, 1], 30, 2, 1, 80, 3), mask=wa.SlidingWindow(60)),
    "4-keys": lambda: call(paged([300, 127], 30, 8, 1, 64, 4, torch.bfloat16), sinks=torch.randn(8)),
    "12-keys": lambda: call(paged([200, 65], 140, 2, 2, 128, 12), mask=wa.Causal()),
    "20-keys": lambda: call(paged([200, 64], 30, 4, 1, 40, 20), mask=wa.Causal(), score=wa.SoftCap(5.0)),
    "300-keys": lambda: call(paged([700, 299], 20, 2, 1, 64, 300)),
}
# Every kind of pages, mask and score occurs in one of these.
DRAWN = ("ragged-without-queries-or-keys", "paged-two-tiles")
CASES = {f"ragged-{name}": make for name, make in RAGGED.items()} | {f"paged-{n}": make for n, make in PAGED.items()}


@pytest.mark.parametrize(("name", "schedule", "seed"), in_turn(CASES, DRAWN, SCHEDULES))
def test_right_and_without_findings(name, schedule, seed):
    check(CASES[name](), schedule, seed)


@pytest.mark.full
def test_queries_of_strangers_are_left_alone():
    """Rows between sequences of the same tensor are another sequence's: a box that is clipped too late shows."""
    q, k, v, seq = ragged([5, 250, 3], [9, 300, 1], 2, 2, 64)
    out = wa.attention_varlen(q, k, v, seq, backend="simulate:sm100")
    expected = wa.attention_varlen(q, k, v, seq, backend="reference")
    torch.testing.assert_close(out, expected, atol=4e-3, rtol=0)
