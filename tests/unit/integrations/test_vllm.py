"""The vLLM backend against a stand-in of vLLM's interface: steps of prefill, chunks and decode over a paged cache."""

import importlib
import itertools
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

import warpattn as wa
from tests.unit.integrations import vllm_double
from warpattn.errors import AttentionError
from warpattn.integrations.step_plans import StepPlans
from warpattn.reference import reference

SHAPE = (4, 2, 16)  # query heads, key heads, head_dim


def make(vllm, **options):
    return vllm.WarpattnImpl(SHAPE[0], SHAPE[2], SHAPE[2] ** -0.5, SHAPE[1], **options)


def run(vllm, impl, engine, new, **step):
    """One step of the engine: {name: output [tokens, heads, dim]}; rows of padding stay as they were."""
    batch, q, k, v = engine.step(new, **step)
    builder = vllm.WarpattnBackend.get_builder_cls()(None, ["layer"], None, q.device)
    metadata = builder.build(0, batch)
    padding = torch.full((3, *q.shape[1:]), torch.nan)
    output = torch.full((len(q) + 3, SHAPE[0], SHAPE[2]), torch.nan)
    impl.do_kv_cache_update(None, k, v, engine.cache, batch.slot_mapping)
    returned = impl.forward(
        None, torch.cat((q, padding)), k, v, engine.cache, metadata, output=output, output_scale=None
    )
    assert returned is output
    assert output[len(q) :].isnan().all()
    ends = batch.query_start_loc.tolist()
    rows = dict(zip(new, itertools.pairwise(ends), strict=True))
    return {name: (q[a:b], output[a:b]) for name, (a, b) in rows.items()}, metadata


def check(engine, results, **modifiers):
    for name, (q, out) in results.items():
        k, v = engine.history[name]
        expected, _ = reference(q[None], k[None], v[None], scale=SHAPE[2] ** -0.5, **modifiers)
        torch.testing.assert_close(out, expected[0])


MODIFIERS = {
    "causal": ({}, {"mask": wa.Causal()}),
    "window": ({"sliding_window": 10}, {"mask": wa.SlidingWindow(10)}),
    "softcap": ({"logits_soft_cap": 1.5}, {"mask": wa.Causal(), "score": wa.SoftCap(1.5)}),
    "alibi": (
        {"alibi_slopes": [0.5, 0.25, 0.1, 0.05]},
        {"mask": wa.Causal(), "score": wa.ALiBi(torch.tensor([0.5, 0.25, 0.1, 0.05]))},
    ),
    "sinks": ({"sinks": torch.tensor([1.0, -1.0, 2.0, 0.0])}, None),
}
MODIFIERS["sinks"] = (MODIFIERS["sinks"][0], {"mask": wa.Causal(), **MODIFIERS["sinks"][0]})


@pytest.mark.parametrize(("options", "modifiers"), MODIFIERS.values(), ids=MODIFIERS)
def test_prefill_chunks_and_decode(vllm, options, modifiers):
    engine, impl = vllm_double.Engine(SHAPE), make(vllm, **options)
    results, metadata = run(vllm, impl, engine, {"a": 21, "b": 5, "c": 40})
    assert metadata.fresh
    check(engine, results, **modifiers)
    for new in ({"a": 1, "b": 1, "c": 17, "d": 30, "e": 2}, *[dict.fromkeys("abcde", 1)] * 2, {"a": 4, "f": 1}):
        results, metadata = run(vllm, impl, engine, new)
        assert not metadata.fresh
        check(engine, results, **modifiers)


def test_without_lengths_on_the_host_everything_is_read_from_pages(vllm):
    engine, impl = vllm_double.Engine(SHAPE), make(vllm)
    results, metadata = run(vllm, impl, engine, {"a": 7, "b": 7, "c": 9}, known_lengths=False)
    assert not metadata.fresh
    check(engine, results, mask=wa.Causal())


def test_a_layer_that_shares_a_cache_reads_the_cache(vllm):
    engine = vllm_double.Engine(SHAPE)
    owner, sharing = make(vllm), make(vllm, kv_sharing_target_layer_name="layer.0")
    batch, q, k, v = engine.step({"a": 21, "b": 5})
    owner.do_kv_cache_update(None, k, v, engine.cache, batch.slot_mapping)
    metadata = vllm.WarpattnMetadataBuilder(None, [], None, q.device).build(0, batch)
    output = torch.full_like(q, torch.nan)
    rubbish = torch.full_like(k, torch.nan)
    sharing.forward(None, q, rubbish, rubbish, engine.cache, metadata, output)
    check(engine, {"a": (q[:21], output[:21]), "b": (q[21:], output[21:])}, mask=wa.Causal())


@pytest.mark.parametrize("kind", ["encoder", "encoder_only"])
def test_encoders_see_both_directions_and_no_cache(vllm, kind):
    engine, impl = vllm_double.Engine(SHAPE), make(vllm, attn_type=kind)
    batch, q, k, v = engine.step({"a": 21, "b": 5})
    metadata = vllm.WarpattnMetadataBuilder(None, [], None, q.device).build(0, batch)
    output = torch.full_like(q, torch.nan)
    impl.forward(None, q, k, v, torch.empty(0), metadata, output)
    check(engine, {"a": (q[:21], output[:21]), "b": (q[21:], output[21:])})


def test_padded_slots_leave_the_cache_alone(vllm):
    impl, cache = make(vllm), torch.randn(4, 2, 16, 32)
    before, new = cache.clone(), torch.randn(3, 2, 16)
    impl.do_kv_cache_update(None, new, -new, cache, torch.tensor([35, -1]))
    assert torch.equal(cache[2, :, 3], torch.cat((new[0], -new[0]), -1))
    cache[2, :, 3] = before[2, :, 3]
    assert torch.equal(cache, before)


def test_padded_requests_get_nothing(vllm):
    engine, impl = vllm_double.Engine(SHAPE), make(vllm)
    run(vllm, impl, engine, {"a": 9, "b": 9})
    batch, q, k, v = engine.step({"a": 1, "b": 1})
    batch.num_reqs = 4
    batch.query_start_loc = batch.query_start_loc_cpu = torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32)
    batch.seq_lens = torch.cat((batch.seq_lens, torch.zeros(2, dtype=torch.int32)))
    batch.block_table_tensor = torch.nn.functional.pad(batch.block_table_tensor, (0, 0, 0, 2))
    metadata = vllm.WarpattnMetadataBuilder(None, [], None, q.device).build(0, batch)
    output = torch.full_like(q, torch.nan)
    impl.do_kv_cache_update(None, k, v, engine.cache, batch.slot_mapping)
    impl.forward(None, q, k, v, engine.cache, metadata, output)
    check(engine, {"a": (q[:1], output[:1]), "b": (q[1:], output[1:])}, mask=wa.Causal())


def test_measuring_memory_gives_zeros(vllm):
    output = torch.full((5, 64), torch.nan)
    assert not make(vllm).forward(None, *(torch.empty(0),) * 4, None, output).any()


def test_outputs_may_be_flat(vllm):
    engine, impl = vllm_double.Engine(SHAPE), make(vllm)
    batch, q, k, v = engine.step({"a": 21})
    metadata = vllm.WarpattnMetadataBuilder(None, [], None, q.device).build(0, batch)
    output = torch.full((21, 64), torch.nan)
    impl.forward(None, q, k, v, engine.cache, metadata, output)
    check(engine, {"a": (q, output.view(21, 4, 16))}, mask=wa.Causal())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype is 'int4'"),
        ({"attn_type": "encoder_decoder"}, "attn_type is 'encoder_decoder'"),
        ({"rope_scaling": 2}, "rope_scaling"),
    ],
)
def test_layers_it_does_not_have_are_refused(vllm, options, match):
    with pytest.raises(AttentionError, match=match):
        make(vllm, **options)


@pytest.mark.parametrize(("name", "scale"), [("fp8", torch.tensor(0.02)), ("fp8_e5m2", torch.tensor([0.5]))])
def test_caches_of_8_bits(vllm, name, scale):
    """Chunks and decode over bytes with the layer's scales: what was stored, nothing else, is attended to."""
    engine, layer = vllm_double.Engine(SHAPE), SimpleNamespace(_k_scale=scale, _v_scale=2 * scale)
    impl = make(vllm, kv_cache_dtype=name)
    stored = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[name]
    cache = torch.zeros_like(engine.cache, dtype=torch.uint8)
    for new in ({"a": 9, "b": 3}, {"a": 1, "b": 5}, {"a": 1, "b": 1}):
        batch, q, k, v = engine.step(new)
        metadata = vllm.WarpattnMetadataBuilder(None, [], None, q.device).build_for_cudagraph_capture(batch)
        impl.do_kv_cache_update(layer, k, v, cache, batch.slot_mapping)
        out = torch.full((len(q), SHAPE[0], SHAPE[2]), torch.nan)
        impl.forward(layer, q, k, v, cache, metadata, output=out)
        for who, (a, b) in zip(new, itertools.pairwise(batch.query_start_loc.tolist()), strict=True):
            k8, v8 = (wa.quantize(x, stored, scale=n * scale.reshape(())).dequantized()[None]
                      for n, x in zip((1, 2), engine.history[who], strict=True))  # fmt: skip
            expected, _ = reference(q[None, a:b], k8, v8, scale=SHAPE[2] ** -0.5, mask=wa.Causal())
            torch.testing.assert_close(out[a:b], expected[0])


def test_quantised_outputs_and_mixed_causality_are_refused(vllm):
    x = torch.empty(0)
    with pytest.raises(AttentionError, match="output_scale"):
        make(vllm).forward(None, x, x, x, x, None, torch.zeros(1, 64), output_scale=torch.ones(1))
    batch, q, *_ = vllm_double.Engine(SHAPE).step({"a": 3})
    batch.causal = torch.tensor([True])
    with pytest.raises(AttentionError, match="causal is a tensor"):
        vllm.WarpattnMetadataBuilder(None, [], None, q.device).build(0, batch)


def test_what_vllm_asks_before_it_chooses(vllm):
    backend = vllm.WarpattnBackend
    assert backend.get_kv_cache_shape(7, 16, 2, 64) == (7, 2, 16, 128)
    assert backend.get_impl_cls() is vllm.WarpattnImpl
    assert backend.get_name() in vllm_double.AttentionBackendEnum.__members__
    assert backend.get_supported_kernel_block_sizes() == [vllm_double.MultipleOf(16)]
    assert [backend.supports_head_size(size) for size in (64, 80, 512, 60, 520)] == [True] * 3 + [False] * 2
    assert backend.supports_sink() and backend.supports_sliding_window()
    assert backend.supports_mm_prefix() and backend.supports_non_causal()
    assert not backend.supports_device_cpu_query_lens_mismatch()
    assert [kind.value for kind in vllm_double.AttentionType if backend.supports_attn_type(kind)] == [
        "decoder", "encoder", "encoder_only"]  # fmt: skip


@pytest.mark.parametrize(("layout", "strides"), [("NHD", (1024, 32, 128, 1)), ("HND", (1024, 256, 32, 1))])
def test_the_cache_lies_as_vllm_is_told(vllm, monkeypatch, layout, strides):
    """vLLM 0.26 asks for the order of the axes in memory, and permutes them back: 4 heads of 16, pages of 8."""
    utils = SimpleNamespace(get_kv_cache_layout=lambda: layout)
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.utils", utils)
    backend = vllm.WarpattnBackend
    shape, order = backend.get_kv_cache_shape(5, 8, 4, 16), backend.get_kv_cache_stride_order()
    memory = torch.zeros([shape[axis] for axis in order])
    cache = memory.permute([order.index(axis) for axis in range(4)])
    assert cache.shape == shape
    assert cache.stride() == strides
    with pytest.raises(NotImplementedError):
        backend.get_kv_cache_stride_order(include_num_layers_dimension=True)


@pytest.mark.parametrize(
    ("hip", "capability", "largest"),
    [(None, (9, 0), 512), (None, (10, 0), 512), (None, (8, 0), 0), ("6.4", (9, 0), 0), ("6.4", (9, 4), 256)],
)
def test_cards(vllm, monkeypatch, hip, capability, largest):
    monkeypatch.setattr(torch.version, "hip", hip)
    card = SimpleNamespace(major=capability[0], minor=capability[1])
    assert vllm.WarpattnBackend.supports_compute_capability(card) == bool(largest)
    rest = (torch.bfloat16, "auto", 16, False, True, False, False, card)
    images = vllm.WarpattnBackend.supports_combination(128, *rest[:-2], True, card)
    assert images is None, "a mask over tensors, which every kernel takes"
    reasons = [vllm.WarpattnBackend.supports_combination(size, *rest) for size in (128, 512)]
    assert reasons[0] is None
    assert (reasons[1] is None) == (largest != 256)
    eight_bit = vllm.WarpattnBackend.supports_combination(128, torch.bfloat16, "fp8", *rest[2:])
    assert (eight_bit is None) == (hip is None and capability == (9, 0))


def test_graphs_hold_any_step_on_hopper_and_none_elsewhere(vllm, monkeypatch):
    builder = vllm.WarpattnMetadataBuilder
    support = vllm_double.AttentionCGSupport
    assert builder.get_cudagraph_support(None, None) is support.NEVER
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    images = SimpleNamespace(model_config=SimpleNamespace(is_mm_prefix_lm=True))
    for capability, wanted, of_images in (
        ((9, 0), support.ALWAYS, support.UNIFORM_BATCH), ((10, 0), support.NEVER, support.NEVER)
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, found=capability: found)
        assert builder.get_cudagraph_support(None, None) is wanted
        assert builder.get_cudagraph_support(images, None) is of_images
        assert vllm.WarpattnBackend.supports_batch_invariance() == (capability == (9, 0))


def test_a_captured_step_is_never_fresh(vllm):
    """The graph serves steps with context, which are not at hand."""
    batch, q, *_ = vllm_double.Engine(SHAPE).step({"a": 9})
    builder = vllm.WarpattnMetadataBuilder(None, [], None, q.device)
    assert builder.build(0, batch).fresh and not builder.build_for_cudagraph_capture(batch).fresh


def test_layers_of_another_group_have_other_pages(vllm):
    batch, q, *_ = vllm_double.Engine(SHAPE).step({"a": 9})
    builder = vllm.WarpattnMetadataBuilder(None, [], None, q.device)
    metadata, table, slots = builder.build(0, batch), torch.ones(1, 1).int(), torch.ones(9)
    other = builder.update_block_table(metadata, table, slots)
    assert other.block_table is table and other.slot_mapping is slots and other.plans is metadata.plans


@pytest.mark.parametrize("method", [None, "ngram", "custom_class", "eagle", "draft_model", "mtp", "not known yet"])
def test_layers_of_a_step_share_lists(vllm, method):
    """Unless a model drafts: it may change lengths in place between passes over its layers."""
    speculation = None if method is None else SimpleNamespace(method=method, num_speculative_tokens=3)
    batch, q, *_ = vllm_double.Engine(SHAPE).step({"a": 9})
    builder = vllm.WarpattnMetadataBuilder(None, [], SimpleNamespace(speculative_config=speculation), q.device)
    first, second = builder.build(0, batch), builder.build(0, batch)
    if method in (None, "ngram", "custom_class"):
        assert first.lists is not None and first.lists is not second.lists
        assert builder.update_block_table(first, None, None).lists is first.lists
    else:
        assert first.lists is None


def test_a_layer_hands_its_step_on(vllm, monkeypatch):
    given = []
    monkeypatch.setattr(StepPlans, "attend", lambda self, *arguments: given.append(arguments[-1]))
    batch, q, *_ = vllm_double.Engine(SHAPE).step({"a": 9})
    step = vllm.WarpattnMetadataBuilder(None, [], None, q.device).build(0, batch)
    impl, engine = make(vllm), vllm_double.Engine(SHAPE)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    impl._ragged(step, impl.modifiers, q, impl._cache(None, engine.cache), torch.empty_like(q))
    assert given == [step.lists]


@pytest.mark.parametrize(
    ("new", "of_decode", "longest"),
    [({"a": 1, "b": 1}, 1, 2), ({"a": 2, "b": 3}, 5, 5), ({"a": 9}, 9, 9)],
)
def test_a_captured_step_may_have_any_prompt_of_its_tokens(vllm, new, of_decode, longest):
    """It is replayed for other lengths, and what the plan leaves out for short prompts stays out of the graph. Only
    where decoding has graphs of its own may one promise a token a request: vLLM's second runner captures those that
    hold mixed steps with one token a request, too."""
    batch, q, *_ = vllm_double.Engine(SHAPE).step(new)
    for separate, expected in ((True, of_decode), (False, longest), (None, longest)):
        mode = None if separate is None else SimpleNamespace(separate_routine=lambda separate=separate: separate)
        config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=mode))
        builder = vllm.WarpattnMetadataBuilder(None, [], config, q.device)
        assert builder.build_for_cudagraph_capture(batch).max_query_len == expected


def test_few_plans_serve_all_steps_and_layers(vllm):
    plans = StepPlans(decoded=4)
    layer, windowed = make(vllm).modifiers, make(vllm, sliding_window=10).modifiers
    assert layer == make(vllm).modifiers != windowed
    pages = torch.randn(64, 16, 2, 32)
    made = []
    for queries in ([1] * 5, [1] * 8, [3, 1, 4], [1, 30], [20] * 3, [2, 40, 1]):
        for modifiers in (layer, layer, windowed):
            cu_q = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32)
            lengths, table = cu_q.diff() + 9, torch.arange(len(queries) * 6, dtype=torch.int32).view(-1, 6)
            kv, seq = wa.PagedKV(*pages.split(16, -1), table, lengths), wa.Ragged(cu_q, max_q=max(queries))
            q = torch.randn(sum(queries), 4, 16)
            out = torch.full_like(q, torch.nan)
            plans.attend(modifiers, q, kv, seq, out, None)
            wanted = wa.attention_paged(q, kv, seq, mask=modifiers.mask, scale=modifiers.scale)
            torch.testing.assert_close(out, wanted)
        made.append(len(plans._plans))
    assert made == [2, 2, 4, 6, 8, 8], "by rounded tokens and requests, and whether all decode"


@pytest.mark.parametrize("takes_names", [True, False])
def test_it_registers_by_its_own_name_and_never_over_another(vllm, takes_names):
    plugin, names = importlib.import_module("warpattn.integrations.vllm_plugin"), vllm_double.AttentionBackendEnum
    vllm_double.takes_names[0] = takes_names
    plugin.register()
    assert names.CUSTOM.get_class() is vllm.WarpattnBackend
    assert [name in names.__members__ for name in ("WARPATTN", "WARPATTN_MLA")] == [takes_names] * 2
    assert vllm.WarpattnBackend.get_name() == ("WARPATTN" if takes_names else "CUSTOM")
    vllm_double.PATHS[names.CUSTOM] = "somebody.else"
    plugin.register()
    assert vllm_double.PATHS[names.CUSTOM] == "somebody.else"


@pytest.mark.parametrize(("version", "warned"), [("0.26.0", 0), ("0.33.1rc2", 0), ("", 0), ("0.25.9", 1), ("1.0", 1)])
def test_versions(vllm, version, warned):
    plugin = importlib.import_module("warpattn.integrations.vllm_plugin")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plugin.check_version(version)
    assert len(caught) == warned
    assert not warned or str(caught[0].message) == f"vLLM is {version}; warpattn's backend was written for 0.26 to 0.33"
