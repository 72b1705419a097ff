"""Steps of vLLM in which a mask is not the layer's own, or which batch invariance changes, against the stand-in."""

from types import SimpleNamespace

import pytest
import torch

import warpattn as wa
from tests.unit.integrations import vllm_double
from tests.unit.integrations.test_vllm import SHAPE, check, make, run
from warpattn.integrations import step_plans
from warpattn.integrations.step_plans import LayerModifiers, ScoreOptions, StepPlans
from warpattn.masks.base import InOrder
from warpattn.problem import backends
from warpattn.problem.memory import COPIED_BYTES
from warpattn.reference import reference
from warpattn.runtime import kernel_cache
from warpattn.serving import StepPlan, workspace

IMAGES = {"a": [(3, 9), (12, 17)], "b": [(0, 4)]}  # first and last positions


def expected(engine, name, q, mask, clamped=None):
    """Attention of a request's last tokens under a mask with its images: every token sees all of its image."""
    k, v = engine.history[name]
    positions = torch.arange(len(k))
    rows = positions[len(k) - len(q) :, None]
    seen = mask.keep(0, 0, rows, positions[None])
    for first, last in IMAGES.get(name, ()):
        both = [(x >= first) & (x <= last) for x in (rows, positions[None])]
        image = both[0] & both[1]
        seen = seen | (image if clamped is None else image & (rows - positions[None] < clamped))
    scale = SHAPE[2] ** -0.5
    return reference(q[None], k[None], v[None], mask=wa.Materialized(seen[None]), scale=scale)[0][0]


def step_with_images(vllm, impl, engine, new, layer=None):
    """Compare a step's requests with `expected`; whether its mask had images."""
    named = list(new)
    ranges = {named.index(name): found for name, found in IMAGES.items() if name in new}
    batch, q, k, v = engine.step(new, mm_req_doc_ranges=ranges)
    metadata = engine.builder.build(0, batch)
    output = torch.full((len(q), SHAPE[0], SHAPE[2]), torch.nan)
    impl.do_kv_cache_update(layer, k, v, engine.cache, batch.slot_mapping)
    impl.forward(layer, q, k, v, engine.cache, metadata, output)
    ends = batch.query_start_loc.tolist()
    window = impl.options.sliding_window
    clamped = window if layer is not None else None
    for index, name in enumerate(new):
        rows = slice(ends[index], ends[index + 1])
        torch.testing.assert_close(output[rows], expected(engine, name, q[rows], impl.modifiers.mask, clamped))
    return metadata


@pytest.mark.parametrize("within_window", [False, True])
@pytest.mark.parametrize("window", [None, 5])
def test_images_see_both_directions(vllm, window, within_window):
    """Fresh prompts, chunks that begin with and between images, and decode beside them."""
    engine, impl = vllm_double.Engine(SHAPE), make(vllm, sliding_window=window)
    engine.builder = vllm.WarpattnMetadataBuilder(None, [], None, torch.device("cpu"))
    layer = SimpleNamespace(mm_prefix_clamp_sliding_window=True) if within_window else None
    first = step_with_images(vllm, impl, engine, {"b": 7, "a": 10}, layer)
    assert first.fresh and first.images is not None
    second = step_with_images(vllm, impl, engine, {"b": 1, "a": 9, "c": 30}, layer)
    assert not second.fresh and second.images is not None
    assert step_with_images(vllm, impl, engine, {"b": 2, "a": 3}, layer).images is None, "all images are behind"
    assert step_with_images(vllm, impl, engine, {"b": 1, "a": 1}, layer).images is None


def test_masks_with_images_are_made_once(vllm):
    """Their tensors stay where they are, so plans and captured launches do."""
    engine, impl = vllm_double.Engine(SHAPE), make(vllm)
    engine.builder = vllm.WarpattnMetadataBuilder(None, [], None, torch.device("cpu"))
    found = [step_with_images(vllm, impl, engine, {name: 20}).images.over(impl.modifiers, False) for name in "ab"]
    assert found[0] is found[1]


def test_a_model_may_take_images_from_some_layers(vllm):
    """vLLM's Gemma 4 sets one of these to None."""
    ranges = {0: [(2, 7)], 1: [(0, 3)]}  # request 1 is not there
    batch, q, *_ = vllm_double.Engine(SHAPE).step({"a": 20}, mm_req_doc_ranges=ranges)
    for name in ("mm_prefix_query_range_tensor", "mm_prefix_range_tensor"):
        metadata = vllm.WarpattnMetadataBuilder(None, [], None, q.device).build(0, batch)
        assert metadata.images is not None
        setattr(metadata, name, None)
        assert metadata.images is None


@pytest.mark.parametrize("window", [None, 6])
def test_steps_that_are_not_causal(vllm, window):
    engine, impl = vllm_double.Engine(SHAPE), make(vllm, sliding_window=window)
    mask = wa.Full() if window is None else wa.SlidingWindow(window, right=window - 1)
    for new in ({"a": 21, "b": 5}, {"a": 4, "b": 4}):
        results, _ = run(vllm, impl, engine, new, causal=False)
        check(engine, results, mask=mask)


def test_batch_invariance_reads_pages_always_and_is_the_plans(vllm, monkeypatch):
    monkeypatch.setattr(vllm_double.envs, "VLLM_BATCH_INVARIANT", True)
    engine, impl = vllm_double.Engine(SHAPE), make(vllm)
    results, metadata = run(vllm, impl, engine, {"a": 21, "b": 5})
    assert not metadata.fresh and metadata.plans.batch_invariant
    check(engine, results, mask=wa.Causal())


def test_plans_of_an_invariant_batch_are_invariant():
    assert not StepPlans().batch_invariant
    plans, pages = StepPlans(batch_invariant=True), torch.randn(8, 16, 2, 32)
    index = {"dtype": torch.int32}
    kv = wa.PagedKV(*pages.split(16, -1), torch.arange(2, **index).view(2, 1), torch.tensor([5, 9], **index))
    q, seq = torch.randn(2, 4, 16), wa.Ragged(torch.tensor([0, 1, 2], **index), max_q=1)
    layer = LayerModifiers(wa.SlidingWindow(4), ScoreOptions(None, None), 0.25)
    out = torch.empty_like(q)
    plans.attend(layer, q, kv, seq, out, None)
    (plan,) = plans._plans.values()
    assert isinstance(plan._tail["mask"], InOrder)
    torch.testing.assert_close(out, wa.attention_paged(q, kv, seq, mask=wa.SlidingWindow(4), scale=0.25))


def attended(plans: StepPlans, mask: wa.Mask, queries: int = 1, page: int = 16) -> StepPlan:
    """The plan that `plans` made for a first step: two requests, of one and of `queries` new tokens."""
    pages, index = torch.randn(8, page, 2, 32), {"dtype": torch.int32}
    table, lengths = torch.arange(4, **index).view(2, 2), torch.tensor([5, queries], **index)
    seq = wa.Ragged(torch.tensor([0, 1, 1 + queries], **index), max_q=queries)
    q = torch.randn(1 + queries, 4, 16)
    layer = LayerModifiers(mask, ScoreOptions(None, None), 0.25)
    plans.attend(layer, q, wa.PagedKV(*pages.split(16, -1), table, lengths), seq, torch.empty_like(q), None)
    return list(plans._plans.values())[-1]


def test_plans_share_a_workspace_where_they_may_have_copies(monkeypatch):
    given = []
    monkeypatch.setattr(workspace, "workspace_bytes", lambda device: 2**20)
    monkeypatch.setattr(step_plans, "StepPlan", lambda *args, workspace=None, **tail: (
        given.append(workspace), StepPlan(*args, **tail))[1])  # fmt: skip
    plans = StepPlans()
    attended(plans, wa.Causal(), queries=9)
    attended(plans, wa.Causal(), queries=30)
    assert given[0] is given[1] and given[0].nbytes == 2**20
    for others, mask, queries, page in (
        (plans, wa.SlidingWindow(4), 9, 16), (plans, wa.Causal(), 1, 16), (plans, wa.Causal(), 9, 128),
        (StepPlans(batch_invariant=True), wa.Causal(), 9, 16),
    ):  # fmt: skip
        attended(others, mask, queries, page)
        assert given.pop() is None


def test_a_full_card_has_no_workspace(monkeypatch, capfd):
    """A line says so, once."""
    def full(*shape, **options):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(workspace, "workspace_bytes", lambda device: 2**29)
    monkeypatch.setattr(workspace.torch, "empty", full)
    monkeypatch.setattr(kernel_cache, "_said", set())
    shared = workspace.StepWorkspace()
    kv = wa.PagedKV(*torch.zeros(2, 4, 16, 2, 16), torch.zeros(1, 1).int(), torch.ones(1).int())
    assert [shared.of(kv, wa.Causal()) for _ in range(2)] == [None, None]
    monkeypatch.undo()
    assert capfd.readouterr().err.count("no 512 MiB left for copies of keys: long prompts take longer") == 1


def test_hopper_has_a_workspace(monkeypatch):
    device, chip = torch.device("cpu"), backends.Chip("sm90", "", "sm90")
    assert workspace.workspace_bytes(device) == 0
    monkeypatch.setattr(workspace, "chip_of", lambda device: chip)
    assert workspace.workspace_bytes(device) == COPIED_BYTES
    workspace.reserve_workspace(device)
