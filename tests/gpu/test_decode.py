"""The Hopper decode kernel on a card: values, determinism, batch invariance, graphs whose lengths change, append."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.sim.sm90.decode import Decode, error, tensors
from warpattn.masks import Causal, Chunked, SlidingWindow
from warpattn.problem import Call, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.launch import PlanOptions
from warpattn.problem.operands import Operands
from warpattn.reference import reference
from warpattn.scores import ALiBi, SoftCap
from warpattn.sequences import Dense, PagedKV
from warpattn.serving import DecodePlan
from warpattn.serving.append import append_paged

pytestmark = pytest.mark.gpu

MIXED = (4000, 1, 0, 129, 64, 8191)
CASES = {
    "dense": Decode((16384,), heads=32, heads_kv=8, dim=128),
    "dense-batch": Decode((4096,) * 32, heads=32, heads_kv=8, dim=128),
    "dense-16-tokens": Decode((3000,) * 4, heads=32, heads_kv=4, dim=128, tokens=16, mask=Causal()),
    "mixed-64": Decode(MIXED, page=64, heads=32, heads_kv=8, dim=128),
    "mixed-16": Decode(MIXED, page=16, heads=32, heads_kv=8, dim=128),
    "mixed-256": Decode(MIXED, page=256, heads=16, heads_kv=2, dim=256, tokens=4, mask=Causal()),
    "dense-512": Decode((4096,) * 4, heads=16, heads_kv=2, dim=512),
    "mixed-512": Decode(MIXED, page=16, heads=16, heads_kv=2, dim=512, tokens=4, mask=Causal()),
    "gathered-512": Decode(MIXED, page=3, heads=8, heads_kv=2, dim=512, sinks=True),
    "mixed-320-264": Decode(MIXED, page=64, heads=8, heads_kv=2, dim=320, dim_v=264, dtype=torch.float16),
    "mixed-8-fp16": Decode(MIXED, page=8, heads=8, heads_kv=8, dim=64, dtype=torch.float16),
    "gathered": Decode(MIXED, page=3, heads=8, heads_kv=2, dim=128),
    "window": Decode(MIXED, page=16, heads=8, heads_kv=2, dim=128, tokens=2, mask=SlidingWindow(700)),
    "chunked": Decode(MIXED, page=16, heads=8, heads_kv=2, dim=128, tokens=4, mask=Chunked(1000) & Causal()),
    "soft-cap": Decode(MIXED, page=64, heads=8, heads_kv=2, dim=128, score=SoftCap(5.0)),
    "sinks": Decode(MIXED, page=64, heads=8, heads_kv=2, dim=128, sinks=True),
    "odd-dims": Decode(MIXED, page=32, heads=8, heads_kv=2, dim=72, dim_v=40),
    "invariant": Decode(MIXED, page=64, heads=32, heads_kv=8, dim=128, invariant=True),
    "many": Decode(tuple(1 + 61 * b % 700 for b in range(1500)), page=64, heads=4, heads_kv=1),
}


class Launched:
    """A case on the card, bound once; `q`, `out` and `sequence` may be written between launches."""

    def __init__(self, case: Decode, ctas: int = 1, first: Any = None) -> None:
        from warpattn.kernels.sm90.decode.choice import choose
        from warpattn.kernels.sm90.decode.launch import list_launches
        from warpattn.runtime.bound_launches import BoundLaunches

        q, dense, sequence, sinks = tensors(case, first)
        self.case, self.q = case, q.cuda()
        self.sinks = None if sinks is None else sinks.cuda()
        if isinstance(sequence, PagedKV):
            cache = (sequence.k_pages, sequence.v_pages, sequence.block_table, sequence.lengths)
            sequence = PagedKV(*(x.cuda() for x in cache))
            self.k, self.v = sequence.k_pages, sequence.v_pages
        else:
            self.k, self.v = (x.cuda() for x in dense)
        self.sequence: Dense | PagedKV = sequence
        asked = Call(self.q, self.k, self.v, sequence, case.mask, case.score, self.sinks, None, True)
        ready = validate(replace(asked, backend="reference"), read_values=False)
        self.out = torch.empty((*q.shape[:3], self.v.shape[-1]), dtype=case.dtype, device="cuda")
        self.lse = torch.empty(ready.lse_shape, device="cuda")
        choice = choose(ready.problem, ARCHS["sm90"], ctas=ctas, options=PlanOptions(batch_invariant=case.invariant))
        operands = Operands(self.q, self.k, self.v, self.out, self.lse, self.sinks)
        self.steps = list_launches(ready, operands, sequence, choice)
        self._bound = BoundLaunches(self.steps, 0)

    def __call__(self) -> tuple[Tensor, Tensor]:
        self.out.fill_(float("nan"))
        self.lse.fill_(float("nan"))
        self._bound.launch()
        return self.out, self.lse

    def check(self) -> None:
        """Hold the last launch against the reference."""
        case = self.case
        want, want_lse = reference(
            self.q, self.k, self.v, sequence=self.sequence, mask=case.mask, score=case.score, sinks=self.sinks
        )
        assert error(self.out.float(), want.float()) < (2e-2 if case.dtype == torch.bfloat16 else 3e-3)
        assert error(self.lse, want_lse) < 1e-3
        assert not self.steps[0].args["workspace"].tickets.any(), "tickets are left as they were found"


@pytest.mark.parametrize("ctas", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_values(name, ctas):
    if ctas == 2 and max(CASES[name].dim, CASES[name].dim_v) > 128:
        pytest.skip("head dim 256 takes 158 registers a thread, two blocks on an SM leave 128: it does not compile")
    launched = Launched(CASES[name], ctas)
    for _ in range(3):
        launched()
        launched.check()


@pytest.mark.parametrize("name", ["dense", "mixed-64", "invariant"])
def test_the_same_bits_every_time(name):
    launched = Launched(CASES[name])
    out, lse = (x.clone() for x in launched())
    for _ in range(16):
        again = launched()
        assert torch.equal(again[0], out) and torch.equal(again[1], lse)


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("page", [0, 3, 16, 64])
def test_everything_written_by_the_preceding_launch(page, tokens, settled):
    """A graph of steps: kernels that directly precede each decode launch write queries and new keys, and lengths and
    table of pages (with a settled cache, new values alone), others follow it at once. Every step's result has the bits
    of the same step run alone."""
    lengths = (4000, 130, 8191, 64) if page else (16384,)
    q, dense, kv, _ = tensors(Decode(lengths, page=page, tokens=tokens, heads=32, heads_kv=8, dim=128))
    steps, batch = 24, len(q)
    rows, grows = torch.arange(batch), torch.arange(batch) % 2 * bool(page)  # every other sequence gets longer
    now = torch.tensor(lengths) + (torch.arange(steps)[:, None] + 1 - steps) * grows
    places = [(rows.cuda(), (row - 1).cuda()) for row in now]
    caches = (dense[0].cuda(), dense[1].cuda())
    tables = torch.empty(0)
    if isinstance(kv, PagedKV):
        tables = kv.block_table.repeat(steps, 1, 1)
        tables[1::2, 2, :2] = tables[1::2, 2, :2].flip(1)  # two old pages of a sequence change places
        at = [(table[rows, (row - 1) // page].long(), (row - 1) % page) for table, row in zip(tables, now, strict=True)]
        places = [(page_of.cuda(), row.cuda()) for page_of, row in at]
        kv = PagedKV(*(x.cuda() for x in (kv.k_pages, kv.v_pages, kv.block_table, kv.lengths)))
        caches, tables, now = (kv.k_pages, kv.v_pages), tables.cuda(), now.to(torch.int32).cuda()
    else:
        kv = caches
    plan = DecodePlan(q.cuda(), kv, cache_settled=settled)
    queries = torch.randn(steps, *q.shape, device="cuda").to(q.dtype)
    new = torch.randn(2, steps, batch, 8, 128, device="cuda").to(q.dtype)
    query, outs = torch.empty_like(queries[0]), torch.zeros_like(queries)

    def step(i):
        caches[0].index_put_(places[i], new[0, i])
        if not settled:
            caches[1].index_put_(places[i], new[1, i])
        query.copy_(queries[i])
        if isinstance(kv, PagedKV):
            kv.block_table.copy_(tables[i])
            kv.lengths.copy_(now[i])
        if settled:
            caches[1].index_put_(places[i], new[1, i])
        outs[i].copy_(plan(query, kv))

    alone = torch.zeros_like(outs)
    for i in range(steps):
        torch.cuda.synchronize()
        step(i)
        torch.cuda.synchronize()
        alone[i] = outs[i]
    want = reference(queries[-1], *caches, sequence=kv if isinstance(kv, PagedKV) else Dense())[0]
    assert error(alone[-1].float(), want.float()) < 2e-2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(steps):
            step(i)
    for _ in range(20):
        outs.zero_()
        graph.replay()
        assert torch.equal(outs, alone)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("page", [3, 16, 64])
def test_attention_right_behind_append(page, dim):
    """A graph of steps on a settled cache: `append_paged` lets attention come before it has written the new tokens.
    Every step's result has the bits of the same step run alone."""
    case = Decode((4000, 130, 8191, 64, 1), page=page, heads=32, heads_kv=8, dim=dim)
    q, _, kv, _ = tensors(case)
    kv = PagedKV(*(x.cuda() for x in (kv.k_pages, kv.v_pages, kv.block_table, kv.lengths)))
    plan, steps = DecodePlan(q.cuda(), kv, cache_settled=True), 24
    queries = torch.randn(steps, *q.shape, device="cuda").to(q.dtype)
    new = torch.randn(2, steps, len(q), 1, 8, dim, device="cuda").to(q.dtype)
    alone, outs = torch.zeros_like(queries), torch.zeros_like(queries)

    def step(i, out):
        append_paged(kv.k_pages, kv.v_pages, kv.block_table, kv.lengths, new[0, i], new[1, i])
        plan(queries[i], kv, out)

    for i in range(steps):
        step(i, alone[i])
        torch.cuda.synchronize()
    want = reference(queries[-1], kv.k_pages, kv.v_pages, sequence=kv)[0]
    assert error(alone[-1].float(), want.float()) < 2e-2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(steps):
            step(i, outs[i])
    for _ in range(20):
        outs.zero_()
        graph.replay()
        assert torch.equal(outs, alone)


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("lengths", [(130, 4000, 64, 1), (16000,), (700,) * 40])
@pytest.mark.parametrize("page", [0, 3, 16])
def test_one_plan_for_all_layers(page, lengths, settled):
    """A graph of layers with caches of their own, one right behind the other on one workspace: each starts before the
    preceding one has ended. Results have the bits of the same layers run alone."""
    case = Decode(lengths if page else (max(lengths),) * len(lengths), page=page, heads=32, heads_kv=8, dim=128)
    layers = []
    for seed in range(8):
        q, caches, kv, _ = tensors(replace(case, seed=seed))
        if page:
            caches = (kv.k_pages, kv.v_pages, kv.block_table, kv.lengths)
        layers.append((q.cuda(), PagedKV(*(x.cuda() for x in caches)) if page else tuple(x.cuda() for x in caches)))
    plan = DecodePlan(*layers[0], cache_settled=settled)
    outs = torch.zeros(len(layers), *layers[0][0].shape, device="cuda", dtype=layers[0][0].dtype)
    for (q, kv), out in zip(layers, outs, strict=True):
        plan(q, kv, out)
        torch.cuda.synchronize()
        want = reference(q, *((kv.k_pages, kv.v_pages) if page else kv), sequence=kv if page else Dense())[0]
        assert error(out.float(), want.float()) < 2e-2
    alone = outs.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for (q, kv), out in zip(layers, outs, strict=True):
            plan(q, kv, out)
    for _ in range(30):
        outs.zero_()
        graph.replay()
        assert torch.equal(outs, alone)


def test_batch_invariance():
    alone = Launched(Decode((9000,), page=64, heads=32, heads_kv=8, dim=128, invariant=True))
    q, (k, v), _, _ = tensors(alone.case)
    company = replace(alone.case, lengths=(9000, 12000, 5, 0, 4096, 333), seed=1)
    out, lse = (x.clone() for x in alone())
    many = Launched(company, first=(q, k, v))()
    assert torch.equal(many[0][0], out[0]) and torch.equal(many[1][0], lse[0])


def test_one_graph_serves_every_step():
    """A captured launch follows the lengths: the batch grows by a token a step."""
    launched = Launched(CASES["mixed-64"])
    sequence = launched.sequence
    assert isinstance(sequence, PagedKV)
    full = sequence.lengths.clone()
    launched()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launched()
    for step in range(8):
        sequence.lengths.copy_((full * (step + 1)) // 8)
        graph.replay()
        launched.check()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("columns", [0, 32, 64])
def test_append(columns, interleaved):
    """The kernel writes what torch writes."""
    case = replace(CASES["mixed-16"], lengths=(400, 3, 0, 129, 64, 900))
    _, _, kv, _ = tensors(case)
    assert isinstance(kv, PagedKV)
    new = [torch.randn(len(case.lengths), 5, case.heads_kv, case.dim).to(case.dtype) for _ in range(2)]
    angle = torch.arange(1000)[:, None] * 0.9 ** torch.arange(columns or 1)
    angles = {"cos": angle.cos(), "sin": angle.sin()} if columns else {}
    card = [x.cuda() for x in (kv.k_pages, kv.v_pages, kv.block_table, kv.lengths, *new)]
    append_paged(kv.k_pages, kv.v_pages, kv.block_table, kv.lengths, *new, **angles, interleaved=interleaved)
    append_paged(*card, **{name: x.cuda() for name, x in angles.items()}, interleaved=interleaved)
    assert torch.allclose(card[0].cpu().float(), kv.k_pages.float(), rtol=1e-2, atol=1e-2, equal_nan=True)
    assert torch.equal(card[1].cpu().nan_to_num(9.0), kv.v_pages.nan_to_num(9.0))


def test_captured_tensors():
    case = Decode(
        MIXED, page=64, heads=4, heads_kv=1, dim=128, score=ALiBi(torch.tensor([0.5, 0.25, 0.1, 0.05]).cuda())
    )
    launched = Launched(case)
    launched()
    launched.check()
