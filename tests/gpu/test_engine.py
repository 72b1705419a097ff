"""What engines use, on a card: slots of a cache, ragged queries over pages, step plans in graphs whose steps change."""

from __future__ import annotations

import importlib

import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from tests.oracle import Inputs, check
from tests.unit.integrations import vllm_double
from warpattn.masks import Causal, SlidingWindow
from warpattn.scores import SoftCap
from warpattn.sequences import PagedKV, PagedRagged, Ragged

pytestmark = pytest.mark.gpu

STEPS = {  # queries and keys of every sequence
    "mixed": ((1, 700, 0, 3, 1, 128), (4000, 900, 64, 100, 8191, 128)),
    "decode": ((1,) * 40, tuple(1 + 61 * b % 700 for b in range(40))),
    "prompts": ((300, 17, 900), (300, 17, 1500)),
    "idle": ((0, 0, 0, 1), (7, 0, 900, 33)),
}


def cache(keys, heads_kv: int = 8, dim: int = 128, page: int = 16):
    """Views (k_pages, v_pages) of one tensor in vLLM's layout, and a table whose unused entries are nowhere."""
    width = max(1, -(-max(keys) // page))
    pages = torch.randn(len(keys) * width + 1, heads_kv, page, 2 * dim, device="cuda").bfloat16()
    table = torch.randperm(len(pages) - 1)[: len(keys) * width].reshape(len(keys), width).int() + 1
    for b, length in enumerate(keys):
        table[b, -(-length // page) :] = 2**30
    return pages.transpose(1, 2).split(dim, -1), table.cuda()


def step(queries, keys, heads: int = 32, **shape):
    """(q, kv, seq) of a step."""
    torch.manual_seed(0)
    pages, table = cache(keys, **shape)
    cu_q = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    q = torch.randn(sum(queries), heads, pages[0].shape[-1], device="cuda").bfloat16()
    return q, PagedKV(*pages, table, torch.tensor(keys, dtype=torch.int32, device="cuda")), Ragged(cu_q)


TAILS = {"causal": {"mask": Causal()}, "window-sinks": {"mask": SlidingWindow(200), "sinks": torch.linspace(-2, 2, 32)},
         "soft-cap": {"mask": Causal(), "score": SoftCap(5.0)}}  # fmt: skip


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("name", STEPS)
def test_ragged_queries_over_pages(name, tail):
    q, kv, seq = step(*STEPS[name])
    options = dict(TAILS[tail])
    if "sinks" in options:
        options["sinks"] = options["sinks"].cuda()
    outs = [wa.attention_paged(q, kv, seq, out=torch.full_like(q, torch.nan), return_lse=True, **options)]
    outs += [wa.attention_paged(q, kv, seq, out=torch.full_like(q, torch.nan), return_lse=True, **options)]
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True)), "the same bits again"
    inputs = Inputs(q, kv.k_pages, kv.v_pages, PagedRagged(kv, seq), soft_cap=tail == "soft-cap", **options)
    check(inputs, *outs[0])


def test_one_graph_serves_every_update():
    largest = step((1,) * 30 + (500, 200), (4000,) * 32)
    plan = wa.StepPlan(*largest, mask=Causal())
    kv, most = largest[1], len(largest[0])
    q = torch.randn(most, 32, 128, device="cuda").bfloat16()
    out = torch.full_like(q, torch.nan)
    plan(q, plan.kv, plan.seq, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan(q, plan.kv, plan.seq, out)
    q[:, 0].float() @ q[:, 0].float().T  # the reference's library takes its workspace
    before = torch.cuda.memory_allocated()
    for queries, keys in (((1,) * 32, (3000,) * 32), ((1, 400, 0, 7), (4000, 400, 9, 50)), ((600, 1), (4000, 1))):
        cu_q = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
        lengths, table = torch.tensor(keys, dtype=torch.int32), kv.block_table[: len(keys)]
        out.fill_(torch.nan)
        plan.update(cu_q, lengths, table)
        graph.replay()
        rows = int(cu_q[-1])
        sequence = PagedRagged(PagedKV(kv.k_pages, kv.v_pages, table, lengths.cuda()), Ragged(cu_q.cuda()))
        check(Inputs(q[:rows], kv.k_pages, kv.v_pages, sequence, mask=Causal()), out[:rows])
        assert out[rows:].isnan().all(), "rows after the last sequence are left alone"
    assert torch.cuda.memory_allocated() <= before + 2**20


@pytest.mark.parametrize("bound", [1, None])
def test_layers_behind_appends_in_a_graph(bound):
    """A decode step of layers as an engine captures it: the bits of the same layers run alone."""
    keys = (4000, 130, 8191, 64, 1, 0, 0, 0)
    q, kv, _ = step((1,) * 8, keys)
    cu_q = torch.tensor([0, 1, 2, 3, 4, 5, 5, 5, 5], dtype=torch.int32, device="cuda")
    slots = torch.full((8,), -1, device="cuda")
    for b, length in enumerate(keys[:5]):
        slots[b] = kv.block_table[b, (length - 1) // 16] * 16 + (length - 1) % 16
    plan = wa.StepPlan(q, kv, Ragged(cu_q, max_q=bound), mask=Causal())
    queries, new = torch.randn(24, *q.shape, device="cuda").bfloat16(), torch.randn(24, 2, 8, 8, 128, device="cuda")
    new, outs = new.bfloat16(), torch.zeros_like(queries)

    def layer(i):
        wa.append_slots(new[i, 0], new[i, 1], kv.k_pages, kv.v_pages, slots)
        plan(queries[i], kv, Ragged(cu_q), outs[i])

    for i in range(24):
        layer(i)
        torch.cuda.synchronize()
    alone = outs.clone()
    inputs = Inputs(queries[-1], kv.k_pages, kv.v_pages, PagedRagged(kv, Ragged(cu_q)), mask=Causal())
    rows = PagedRagged(PagedKV(kv.k_pages, kv.v_pages, kv.block_table[:5], kv.lengths[:5]), Ragged(cu_q[:6]))
    check(Inputs(inputs.q[:5], inputs.k, inputs.v, rows, mask=Causal()), alone[-1, :5])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(24):
            layer(i)
    for _ in range(20):
        outs.zero_()
        graph.replay()
        assert torch.equal(outs, alone)


@pytest.mark.parametrize("copied", [False, True])
def test_layers_of_a_step_share_lists(copied):
    """Eager and in a graph whose steps change: the bits of layers that make lists of their own."""
    q, kv, seq = step((1,) * 20 + (1500, 200), (5000,) * 22)
    layers = [PagedKV(*cache([5000] * 22)[0], kv.block_table, kv.lengths) for _ in range(3)]
    workspace = torch.empty(2**28, dtype=torch.uint8, device="cuda") if copied else None
    plan = wa.StepPlan(q, kv, seq, mask=Causal(), workspace=workspace)
    assert plan.copied_queries == (1024 if copied else None)
    outs = torch.full((3, *q.shape), torch.nan, device="cuda").bfloat16()

    def attend(of):
        for pages, out in zip(layers, outs, strict=True):
            plan(q, plan.kv.with_fields(k_pages=pages.k_pages, v_pages=pages.v_pages), plan.seq, out, step=of)

    attend(None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(object())
    for queries, keys in (*STEPS.values(), ((1500, 1, 90), (5000, 40, 90))):  # the last one's keys are copied
        most = min(len(queries), 22)
        cu_q = torch.tensor([0, *torch.tensor(queries[:most]).cumsum(0).tolist()], dtype=torch.int32)
        lengths = torch.tensor(keys[:most], dtype=torch.int32).clamp(max=5000)
        plan.update(cu_q, lengths, kv.block_table[:most])
        found = []
        for run in (lambda: attend(None), lambda: attend(object()), graph.replay):
            outs.fill_(torch.nan)
            run()
            found.append(outs.clone())
        rows = int(cu_q[-1])
        alone, *shared = (out[:, :rows] for out in found)
        assert alone.isfinite().all() and found[0][:, rows:].isnan().all()
        assert all(torch.equal(alone, out) for out in shared)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("tokens", [1, 40, 3000])
def test_slots(tokens, rotated):
    """The CPU's result, in a cache that two views share; a graph writes wherever the slots say."""
    torch.manual_seed(0)
    pages = torch.full((300, 8, 16, 256), torch.nan).bfloat16()
    expected = pages.clone()
    k, v = torch.randn(2, tokens + 3, 8, 128).bfloat16()
    named = {}
    if rotated:
        angle = torch.arange(5000)[:, None] * 0.9 ** torch.arange(32)
        named = {"cos": angle.cos(), "sin": angle.sin(), "positions": torch.randint(0, 5000, (tokens,))}
    card = pages.cuda()
    on_card = {name: x.cuda() for name, x in named.items()}
    slots = torch.zeros(tokens, dtype=torch.int64, device="cuda")
    tensors = (k.cuda(), v.cuda(), *card.transpose(1, 2).split(128, -1), slots)
    slots.fill_(-1)
    wa.append_slots(*tensors, **on_card)
    assert card.isnan().all(), "padding writes nothing"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wa.append_slots(*tensors, **on_card)
    for _ in range(2):
        wanted = torch.randperm(4800)[:tokens]
        wanted[torch.rand(tokens) < 0.1] = -1
        slots.copy_(wanted)
        graph.replay()
        wa.append_slots(k, v, *expected.transpose(1, 2).split(128, -1), wanted, **named)
        a, b = card.cpu().float().nan_to_num(9e9), expected.float().nan_to_num(9e9)
        assert torch.allclose(a, b, rtol=1e-2 if rotated else 0, atol=1e-2 if rotated else 0)


def with_shared_pages(kv: PagedKV, pages: int) -> PagedKV:
    """The cache with its first pages the same in all sequences, and the promise that they are."""
    kv.block_table[:, :pages] = kv.block_table[0, :pages].clone()
    return PagedKV(kv.k_pages, kv.v_pages, kv.block_table, kv.lengths, pages)


@pytest.mark.parametrize("tail", ["causal", "soft-cap"])
@pytest.mark.parametrize("queries", [(1,) * 40, (1, 700, 3, 2), (5,)], ids=["decode", "mixed", "one"])
def test_a_shared_prefix(queries, tail):
    keys = tuple(512 + n + 37 * b for b, n in enumerate(queries))
    q, kv, seq = step(queries, keys)
    options = {**TAILS[tail], "sinks": torch.linspace(-2, 2, 32, device="cuda")}
    found = wa.attention_paged(q, with_shared_pages(kv, 32), seq, return_lse=True, **options)
    inputs = Inputs(q, kv.k_pages, kv.v_pages, PagedRagged(kv, seq), soft_cap=tail == "soft-cap", **options)
    check(inputs, *found)


def test_a_shared_prefix_in_a_graph_whose_steps_change():
    q, kv, seq = step((1,) * 40, (2000,) * 40)
    kv, out = with_shared_pages(kv, 32), torch.full_like(q, torch.nan)

    def attend(cache):
        return wa.attention_paged(q, cache, seq, mask=Causal(), out=out, return_lse=True)

    attend(kv)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = attend(kv)
    for lengths in (2000, 513, 1500):
        kv.lengths.copy_(torch.arange(40) % 7 + lengths - 7 + (7 if lengths == 513 else 0))
        graph.replay()
        check(Inputs(q, kv.k_pages, kv.v_pages, PagedRagged(kv, seq), mask=Causal()), out, lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_merging(dtype):
    torch.manual_seed(0)
    outs, lses = torch.randn(3, 700, 8, 72, device="cuda").to(dtype), 9 * torch.randn(3, 8, 700, device="cuda")
    lses[0, :, 0] = lses[1, :, 0] = lses[2, :, 0] = lses[1, :, 1] = -torch.inf
    lses[2, 3, 5], outs[1, 1] = torch.nan, torch.nan
    pairs = list(zip(outs, lses, strict=True))
    expected = wa.merge_states(pairs, backend="reference")
    for _ in range(2):
        torch.testing.assert_close(wa.merge_states(pairs), expected, equal_nan=True)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("tail", TAILS)
def test_a_token_has_the_same_bits_in_every_step(tail, dim):
    """A prompt in one step beside others, in chunks of any size, and its tokens one by one: plans of three sizes."""
    options = dict(TAILS[tail])
    if "sinks" in options:
        options["sinks"] = options["sinks"].cuda()
    q, kv, seq = step((1500, 1, 700), (1500, 4000, 900), dim=dim)
    q = 4 * q  # references of rows move
    plan = wa.StepPlan(q, kv, seq, batch_invariant=True, **options)
    whole = plan(q, kv, seq)
    inputs = Inputs(q, kv.k_pages, kv.v_pages, PagedRagged(kv, seq), soft_cap=tail == "soft-cap", **options)
    check(inputs, whole)
    for begin, end in ((0, 1), (0, 900), (900, 1500), (37, 166), (1490, 1500), (1499, 1500), (128, 130)):
        cache = PagedKV(kv.k_pages, kv.v_pages, kv.block_table[:1], torch.full_like(kv.lengths[:1], end))
        one = Ragged(torch.tensor([0, end - begin], dtype=torch.int32, device="cuda"), max_q=end - begin)
        part = wa.StepPlan(q[begin:end], cache, one, batch_invariant=True, **options)(q[begin:end], cache, one)
        assert torch.equal(part, whole[begin:end]), (begin, end)


@pytest.mark.parametrize("window", [None, 200])
def test_images_of_vllm_see_both_directions(monkeypatch, window):
    """Through step plans, whose masks keep their tensors from step to step."""
    vllm_double.install(monkeypatch)
    vllm = importlib.import_module("warpattn.integrations.vllm")
    engine, shape = vllm_double.Engine((8, 2, 64), torch.bfloat16, pages=200), (8, 64, 0.125, 2)
    engine.cache = engine.cache.cuda()
    layer = vllm.WarpattnImpl(*shape, sliding_window=window)
    builder = vllm.WarpattnMetadataBuilder(None, [], None, torch.device("cuda"))
    images = {"a": [(30, 700), (901, 1100)], "b": [(1, 3)], "c": []}
    for new in ({"a": 800, "b": 5}, {"b": 1, "a": 400, "c": 300}, {"b": 1, "a": 2, "c": 1}):
        batch, q, k, v = engine.step(new, mm_req_doc_ranges={index: images[name] for index, name in enumerate(new)})
        for name in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping"):
            setattr(batch, name, getattr(batch, name).cuda())
        metadata, out = builder.build_for_cudagraph_capture(batch), torch.full_like(q, torch.nan).cuda()
        assert (metadata.images is None) == (new["a"] == 2)
        layer.do_kv_cache_update(None, k.cuda(), v.cuda(), engine.cache, batch.slot_mapping)
        layer.forward(None, q.cuda(), k.cuda(), v.cuda(), engine.cache, metadata, out)
        for name, own in zip(new, torch.split(torch.arange(len(q)), list(new.values())), strict=True):
            keys, values = (x[None].cuda() for x in engine.history[name])
            at = torch.arange(keys.shape[1], device="cuda")
            row, key = at[len(at) - len(own) :, None], at[None]
            seen = (key <= row) & (row - key < (window or len(at)))
            for first, last in images[name]:
                seen |= (row >= first) & (row <= last) & (key >= first) & (key <= last)
            mask = wa.Materialized(seen[None])
            check(Inputs(q[own][None].cuda(), keys, values, mask=mask), out[own.cuda()][None])
