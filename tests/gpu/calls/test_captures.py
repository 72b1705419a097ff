"""Plans that are made while a CUDA graph is captured serve later calls outside of it, whatever other graphs do."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from tests.gpu.test_engine import step
from tests.oracle import Inputs, check
from warpattn.integrations.step_plans import ScoreOptions, layer_score
from warpattn.masks import Causal
from warpattn.sequences import PagedKV, PagedRagged, Ragged

pytestmark = pytest.mark.gpu

KEYS = (4000, 130, 8191)  # split among CTAs


def graph_with_temporaries(pool) -> torch.cuda.CUDAGraph:
    """It fills memory of the pool that is free again once it has been captured."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        for size in (1, 8, 64, 512, 4096, 2**15, 2**20):
            held = [torch.full((size,), 7, dtype=torch.int32, device="cuda") for _ in range(16)]
        del held
    return graph


@pytest.mark.parametrize("kind", ["step", "decode"])
def test_a_plan_made_in_a_capture(kind):
    q, kv, seq = step((1,) * len(KEYS), KEYS)
    pool = torch.cuda.graph_pool_handle()
    inputs = Inputs(q, kv.k_pages, kv.v_pages, PagedRagged(kv, seq), mask=Causal())
    if kind == "decode":
        q, seq = q[:, None], None
        inputs = Inputs(q, kv.k_pages, kv.v_pages, kv, mask=Causal())
    inside, outside = torch.full_like(q, torch.nan), torch.full_like(q, torch.nan)
    other, graph = graph_with_temporaries(pool), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        if seq is None:
            plan = wa.DecodePlan(q, kv, mask=Causal())
            plan(q, kv, inside)
        else:
            plan = wa.StepPlan(q, kv, seq, mask=Causal())
            plan(q, kv, seq, inside)
    for _ in range(3):  # before the graph is replayed, and after
        other.replay()
        plan(q, kv, outside) if seq is None else plan(q, kv, seq, outside)
        check(inputs, outside)
        other.replay()
        graph.replay()
        check(inputs, inside)
        inside.fill_(torch.nan)
        outside.fill_(torch.nan)


def test_a_plans_own_indices_first_used_in_a_capture():
    q, kv, seq = step((1, 400, 7), KEYS)
    plan, out = wa.StepPlan(q, kv, seq, mask=Causal()), torch.full_like(q, torch.nan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan(q, plan.kv, plan.seq, out)
    for queries, keys in (((1, 400, 7), KEYS), ((300, 1, 1), (300, 100, 5000))):
        cu_q = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
        lengths = torch.tensor(keys, dtype=torch.int32)
        plan.update(cu_q, lengths, kv.block_table)
        graph.replay()
        rows = int(cu_q[-1])
        sequence = PagedRagged(PagedKV(kv.k_pages, kv.v_pages, kv.block_table, lengths.cuda()), Ragged(cu_q.cuda()))
        check(Inputs(q[:rows], kv.k_pages, kv.v_pages, sequence, mask=Causal()), out[:rows])


def test_slopes_of_a_layer_made_in_a_capture():
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        score = layer_score(ScoreOptions(None, (0.5, 0.25)), torch.device("cuda", torch.cuda.current_device()))
        torch.zeros(1, device="cuda")
    assert score.slopes.tolist() == [0.5, 0.25]
