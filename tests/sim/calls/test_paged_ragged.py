"""Ragged queries over a paged cache on Blackwell and CDNA: one kernel for every sequence. Hopper's two are in
sm90/ragged/test_paged_ragged.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from tests.drawn import drawn, in_turn
from tests.oracle import Inputs, check
from tests.paged_steps import Step, tensors
from warpattn.masks import Causal, CustomMask, Full, SlidingWindow
from warpattn.problem import Call, validate
from warpattn.problem.launch import Launch
from warpattn.problem.operands import Operands
from warpattn.runtime.launches import list_launches
from warpattn.runtime.plan import plan
from warpattn.runtime.simulate import Options, run_launch
from warpattn.scores import SoftCap
from warpattn.sequences import PagedRagged, Ragged

ARCHS = ("sm100", "gfx942", "gfx950")
MIXED = ((1, 70, 0, 3, 1, 0), (40, 90, 5, 100, 260, 0))  # queries, keys
STEPS = {
    "mixed": Step(*MIXED),
    "one-each": Step((1, 1, 1), (300, 7, 64), max_q=1),
    "not-grouped": Step((16, 17, 1), (16, 50, 90), heads=2, max_q=40),
    "prompts-of-two-tiles": Step((200, 1), (330, 5), heads=2, mask=Full()),
    "d128": Step((1, 40, 2), (260, 90, 30), dim=128, sinks=True),
    "odd-dim": Step((1, 20, 2), (60, 50, 30), dim=40, dtype=torch.float16),
    "d192": Step((1, 20, 2), (60, 50, 30), dim=192),
    "pages-of-3": Step((1, 20, 2), (60, 50, 30), page=3),
    "window-sinks": Step(*MIXED, mask=SlidingWindow(50), sinks=True),
    "soft-cap": Step(*MIXED, score=SoftCap(3.0)),
    "by-batch": Step(*MIXED, mask=Causal() & CustomMask(lambda b, h, q, k: (k + b + h) % 3 != 0)),
}
IN_PARTS = {  # few rows, many keys: several CTAs for each
    "one-each": Step((1, 0, 1), (1100, 40, 2100), max_q=1, sinks=True),
    "drafts": Step((3, 0, 4), (1100, 40, 300), max_q=4, mask=SlidingWindow(900)),
    "no-bound": Step((5, 2), (1100, 2), score=SoftCap(3.0)),
    "d256": Step((3, 0, 1), (1100, 40, 30), dim=256, max_q=3),
}
CASES = [(arch, name) for arch in ARCHS for name in STEPS]
PARTS = [(arch, name) for arch in ARCHS for name in IN_PARTS]
PARTS_KEPT = [("gfx942", "drafts")]
KEPT = [("sm100", "d192"), ("gfx942", "mixed"), ("gfx950", "one-each")]


def prepared(arch: str, x: Inputs) -> tuple[tuple[Launch, ...], torch.Tensor, torch.Tensor]:
    """(launches, output, LSE) as on a card, where nothing is read from offsets."""
    call = Call(x.q, x.k, x.v, x.sequence, x.mask, x.score, x.sinks, None, True, None, f"simulate:{arch}")
    ready = validate(call, read_values=False)
    out, lse = torch.full_like(x.q, torch.nan), torch.full(ready.lse_shape, torch.nan)
    return list_launches(ready, Operands(x.q, x.k, x.v, out, lse, x.sinks), x.sequence), out, lse


def attend(arch: str, step: Step, padding: int, schedule: str) -> list[str]:
    """Names of the launches, after values, findings and rows of padding are checked."""
    x, tokens = tensors(step, padding), sum(step.queries)
    launches, out, lse = prepared(arch, x)
    reports = [run_launch(launch, Options(schedule)) for launch in launches]
    assert all(report.clean for report in reports), reports
    assert out[tokens:].isnan().all() and lse[:, tokens:].isnan().all(), "padding is left alone"
    check(replace(x, q=x.q[:tokens]), out[:tokens], lse[:, :tokens])
    return [launch.name for launch in launches]


@pytest.mark.parametrize(("case", "schedule"), in_turn(CASES, KEPT, [("lazy",), ("adversarial",)], each=1), ids=str)
def test_right_and_without_findings(case: tuple[str, str], schedule: str) -> None:
    arch, name = case
    attend(arch, STEPS[name], padding=5, schedule=schedule)


@pytest.mark.parametrize(("arch", "name"), drawn(PARTS, PARTS_KEPT))
def test_keys_in_parts(arch: str, name: str) -> None:
    """Rows that no sequence has are not combined, either."""
    names = attend(arch, IN_PARTS[name], padding=3, schedule="adversarial")
    assert names[1:] == [f"{arch}.combine"]


FEWER = [("sm100", "one-each"), ("gfx950", "one-each"), ("sm100", "d256")]


@pytest.mark.parametrize(("arch", "name"), drawn(FEWER, FEWER[1:2]))
def test_a_plan_for_more_sequences_serves_fewer(arch: str, name: str) -> None:
    """As `StepPlan` does: the grid stays, and nothing is read of sequences past the number that it writes."""
    step = IN_PARTS[name]
    batch, tokens = len(step.queries), sum(step.queries)
    x = tensors(replace(step, queries=(*step.queries, 1, 0), keys=(*step.keys, 1100, 7)))
    launches, out, lse = prepared(arch, x)
    cu_q, lengths, table = x.sequence.cu_q, x.sequence.kv.lengths, x.sequence.kv.block_table
    fewer = replace(x.sequence.kv, block_table=table[:batch].clone(), lengths=lengths[:batch].clone())
    there = PagedRagged(fewer, Ragged(cu_q[: batch + 1].clone(), max_q=step.max_q))
    for past in (cu_q[batch + 1 :], lengths[batch:], table[batch:]):
        past.fill_(2**30)
    for launch in launches:
        named = {name: launch.args[name] for name in ("sequence_args", "indices", "only") if name in launch.args}
        counted = {name: value._replace(batch=batch) for name, value in named.items()}
        assert run_launch(replace(launch, args=launch.args | counted), Options("adversarial")).clean
    assert out[tokens:].isnan().all() and lse[:, tokens:].isnan().all()
    check(replace(x, q=x.q[:tokens], sequence=there), out[:tokens], lse[:, :tokens])


@pytest.mark.parametrize("arch", ARCHS)
def test_a_bound_of_one_query_makes_the_grid_of_equally_many(arch: str) -> None:
    """40 requests with one token each are no prompt of 40 tokens."""
    x = tensors(Step((1,) * 40, (300,) * 40, max_q=1))
    steps = Call(x.q, x.k, x.v, x.sequence, backend=f"simulate:{arch}")
    equal = Call(x.q[:, None], x.k, x.v, x.sequence.kv, backend=f"simulate:{arch}")
    a, b = (plan(validate(call, read_values=False).problem, arch).choice for call in (steps, equal))
    assert (a.grid, a.partitions) == (b.grid, b.partitions)


STORED = [("sm100", MIXED[0]), ("gfx942", (1, 2, 0, 1, 1, 0))]


@pytest.mark.parametrize(("arch", "queries"), drawn(STORED, STORED[1:]))
def test_pages_of_8_bits(arch: str, queries: tuple[int, ...]) -> None:
    """Prefill on Blackwell, decode on CDNA."""
    stored = {"sm100": torch.float8_e4m3fn, "gfx942": torch.float8_e4m3fnuz}[arch]
    x = tensors(Step(queries, MIXED[1], max_q=max(queries)))
    scales = {"k_scale": torch.tensor([0.5, 2.0]), "v_scale": torch.tensor(0.3)}
    kv = replace(x.sequence.kv, k_pages=x.k.to(stored), v_pages=x.v.to(stored), **scales)
    found, wanted = (
        wa.attention_paged(x.q, kv, x.sequence.queries, mask=Causal(), backend=backend)
        for backend in (f"simulate:{arch}", "reference")
    )
    torch.testing.assert_close(found, wanted, atol=4e-3, rtol=2e-2)


@pytest.mark.full
def test_products_of_8_bits() -> None:
    """Queries of 8 bits, too: weights are rounded to e4m3, see `tests/sim/sm100/test_products.py` for its bounds."""
    x = tensors(Step(*MIXED))
    scales = {"k_scale": torch.tensor([0.5, 2.0]), "v_scale": torch.tensor(0.3)}
    kv = replace(x.sequence.kv, k_pages=x.k.to(torch.float8_e4m3fn), v_pages=x.v.to(torch.float8_e4m3fn), **scales)
    found, wanted = (
        wa.attention_paged(wa.quantize(x.q), kv, x.sequence.queries, mask=Causal(), backend=backend).float()
        for backend in ("simulate:sm100", "reference")
    )
    assert torch.nn.functional.cosine_similarity(found.flatten(), wanted.flatten(), dim=0) >= 0.9997
    assert (found - wanted).norm() <= 3.5e-2 * wanted.norm()
