"""What FlashInfer's wrappers keep from `plan` to `run`: copies of tensors, and all of a plan or nothing of it."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

import warpattn.integrations.flashinfer as flashinfer
from tests.unit.integrations import test_flashinfer_mla as latent
from tests.unit.integrations.test_flashinfer import DIM, HEADS, HEADS_KV, KEYS, PAGE, QUERIES, WORKSPACE, Batch, offsets
from tests.unit.integrations.test_flashinfer_older import decode, paged, ragged
from warpattn.errors import AttentionError
from warpattn.integrations.flashinfer.masks import packed_mask

SIZES = (HEADS, HEADS_KV, DIM)
PAIRS = sum(q * k for q, k in zip(QUERIES, KEYS, strict=True))


def latents(batch):
    """The parts of a call of the latent wrapper, in the order of `paged`."""
    made = latent.Latents((1, 1, 1, 3))
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE)
    return wrapper, made.lists, made.parts


def levels(batch):
    """One level of a cascade."""
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(1, WORKSPACE)
    return wrapper, ([offsets(QUERIES)], *([x] for x in batch.pages), *SIZES, PAGE), (torch.cat(batch.q), batch.cache)


def plan(wrapper, given):
    wrapper.plan(*given, **(latent.SIZES if isinstance(wrapper, flashinfer.BatchMLAPagedAttentionWrapper) else {}))


def batch_of(kind):
    return Batch(queries=(1,) * 4 if kind is decode else QUERIES)


@pytest.mark.parametrize("kind", [decode, paged, ragged])
def test_a_plan_reads_the_callers_tensors_once(kind):
    wrapper, given, call = kind(batch_of(kind))
    wrapper.plan(*given)
    expected = wrapper.run(*call)
    for x in given:
        if isinstance(x, torch.Tensor):
            x.fill_(0)
    assert torch.equal(wrapper.run(*call), expected)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(decode, "indptr"), (paged, "paged_kv_indptr"), (levels, "paged_kv_indptr_arr"), (latents, "kv_indptr")],
)
def test_errors_of_a_plan_name_its_arguments(kind, name):
    wrapper, given, _ = kind(batch_of(kind))
    at = [*inspect.signature(type(wrapper).plan).parameters].index(name) - 1
    wrong = [x + 1 for x in given[at]] if isinstance(given[at], list) else given[at] + 1
    with pytest.raises(AttentionError, match=f"^(.*\n  - )?{name} (lists|begins)"):
        plan(wrapper, (*given[:at], wrong, *given[at + 1 :]))


Q, K = torch.randn(3, HEADS, DIM), torch.randn(5, HEADS_KV, DIM)
NARROW = torch.zeros(40, 2, PAGE + 1, HEADS_KV, DIM).to(torch.float8_e4m3fn)


def changed(kind, *call, **options):
    wrapper, given, usual = kind(batch_of(kind))
    wrapper.plan(*given)
    return wrapper.run(*(call or usual), **options)


LISTED = {
    "logits_soft_cap pos_encoding_mode q_scale kv_layout": lambda: flashinfer.single_decode_with_kv_cache(
        Q[0], K, K, "DHN", "ALIBI", q_scale="a", logits_soft_cap=float("nan")
    ),
    "k_scale v_scale o_dtype": lambda: flashinfer.single_prefill_with_kv_cache(
        Q, *NARROW[:2, 0], k_scale=-1, v_scale="c", o_dtype="half"
    ),
    "k_scale paged_kv_cache": lambda: changed(decode, Q, NARROW, k_scale=-1),
    "lse lse": lambda: changed(ragged, lse=Q[..., 0].half(), return_lse=True),
}


@pytest.mark.parametrize("names", LISTED)
def test_every_broken_rule_is_listed(names):
    with pytest.raises(AttentionError) as found:
        LISTED[names]()
    assert [reason.split()[0] for reason in found.value.reasons] == names.split()


@pytest.mark.parametrize("kind", [decode, paged, ragged, latents, levels])
def test_errors_of_a_run_name_its_arguments(kind):
    wrapper, given, call = kind(batch_of(kind))
    plan(wrapper, given)
    rows, cache = call[0], 1 if kind in (decode, paged, levels) else None
    wrong = [(torch.cat((rows, rows[:1])), *call[1:])]
    if kind is latents:
        wrong = [(*(torch.cat((x, x[:1])) for x in call[:2]), *call[2:])]
    if cache is not None:
        wrong.append((rows, tuple(x.double() for x in call[cache])))
    for one in wrong:
        with pytest.raises(AttentionError) as found:
            wrapper.run(*one)
        assert not re.search(r"\b(seq|kv)\.", str(found.value))


@pytest.mark.parametrize("kind", [paged, ragged])
def test_a_plan_reads_a_mask_once(kind):
    wrapper, given, call = kind(Batch())
    seen = torch.rand(PAIRS) < 0.5
    wrapper.plan(*given, custom_mask=seen)
    expected = wrapper.run(*call)
    seen.fill_(True)
    assert torch.equal(wrapper.run(*call), expected)


def test_another_plan_of_a_graph_leaves_the_callers_tensors_alone():
    buffers = [torch.empty(n, dtype=torch.int32) for n in (5, 5, 30, 4)]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "NHD", True, *buffers)
    _, (first, *rest), _ = paged(Batch())
    wrapper.plan(first, *rest)
    wrapper.plan(offsets((1, 1, 1, 1)), *rest)
    assert torch.equal(first, offsets(QUERIES))


def test_lists_after_a_table_leave_the_table_alone():
    """And the memory of lists stays that of lists, which a graph may have captured."""
    buffers = [torch.empty(n, dtype=torch.int32) for n in (5, 5, 7, 4)]
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE, True, *buffers)
    batch, other = latent.Latents(), latent.Latents()
    table = torch.zeros(4, 7, dtype=torch.int32)
    table[:, : batch.table.shape[1]] = batch.table
    kept, places = table.clone(), set()
    for _ in range(2):
        wrapper.plan(*other.lists, causal=True, **latent.SIZES)
        places.add(wrapper.tables.table.data_ptr())
        other.check(*wrapper.run_return_lse(*other.parts))
        metadata = flashinfer.MLAPlanMetadata.dense(batch.cu_q, table, batch.lengths)
        wrapper.plan(metadata=metadata, causal=True, **latent.SIZES)
        batch.check(*wrapper.run_return_lse(*batch.parts))
    wrapper.plan(*other.lists, causal=True, **latent.SIZES)
    assert torch.equal(table, kept) and batch.lengths.tolist() == list(latent.KEYS)
    assert places == {wrapper.tables.table.data_ptr()}


def test_graphs_have_bounds_of_no_plan():
    """A later plan may have longer requests; few tokens of latent queries stay few."""
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, "NHD", True)
    wrapper.plan(offsets(QUERIES), offsets(KEYS), *SIZES)
    assert wrapper.seq.max_q is wrapper.seq.max_k is None
    for tokens, bound in ((16, 16), (17, None)):
        wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE, True)
        wrapper.plan(*latent.Latents((tokens, 1, 1, 1)).lists, **latent.SIZES)
        assert wrapper.max_q == bound


def test_bits_of_a_mask_are_counted_in_32():
    bits = torch.empty(2**28, dtype=torch.uint8, device="meta")
    with pytest.raises(AttentionError, match="it may have up to 268435455"):
        packed_mask(bits, torch.tensor([0, 2**15]), torch.tensor([2**16]), bits.device)


def test_states_that_require_gradients_are_merged_in_place_without_them():
    v, s = torch.randn(3, 2, 8, requires_grad=True), torch.randn(3, 2)
    other = torch.randn(3, 2, 8), torch.randn(3, 2)
    with torch.no_grad():
        expected, _ = flashinfer.merge_state(v, s, *other)
        flashinfer.merge_state_in_place(v, s, *other)
    assert torch.equal(v, expected)


WRONG = {
    decode: lambda given: (*given[:2], given[2] + PAGE, *given[3:]),
    paged: lambda given: (*given[:3], given[3] + PAGE, *given[4:]),
    ragged: lambda given: (given[0][:-1], *given[1:]),
    levels: lambda given: (*given[:3], [given[3][0] + PAGE], *given[4:]),
    latents: lambda given: (*given[:3], given[3] + 99),
}


@pytest.mark.parametrize("kind", WRONG)
def test_after_a_plan_that_fails_nothing_is_planned(kind):
    """Not the pages of one plan with the options of another."""
    batch = batch_of(kind)
    wrapper, given, call = kind(batch)
    plan(wrapper, given)
    expected = wrapper.run(*call)
    with pytest.raises(AttentionError):
        plan(wrapper, WRONG[kind](given))
    with pytest.raises(AttentionError, match="called before plan"):
        wrapper.run(*call)
    plan(wrapper, given)
    assert torch.equal(wrapper.run(*call), expected)


def test_options_of_forward_that_are_refused_change_nothing():
    wrapper, given, call = decode(batch_of(decode))
    wrapper.plan(*given)
    expected = wrapper.run(*call, window_left=3)
    with pytest.raises(AttentionError, match="logits_soft_cap"):
        wrapper.forward(*call, logits_soft_cap=float("inf"), sm_scale=3.0)
    assert torch.equal(wrapper.run(*call, window_left=3), expected)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("kind", "name"), [(paged, "paged_kv_indptr"), (ragged, "kv_indptr")])
def test_queries_and_keys_of_other_requests(kind, name, masked):
    wrapper, (queries, *rest), _ = kind(Batch())
    options = {"custom_mask": torch.ones(PAIRS, dtype=torch.bool)} if masked else {}
    with pytest.raises(AttentionError, match=f"qo_indptr has 4 offsets and {name} 5"):
        wrapper.plan(queries[:-1], *rest, **options)


@pytest.mark.parametrize("name", ["seq_lens", "block_tables", "cum_seq_lens_q"])
def test_latent_tables_of_64_bits_are_not_cut(name):
    batch = latent.Latents()
    given = {"cum_seq_lens_q": batch.cu_q, "block_tables": batch.table, "seq_lens": batch.lengths}
    given[name] = given[name].long() + 2**32
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE)
    with pytest.raises(AttentionError, match=f"{name} has the element 42949.*32 bits"):
        wrapper.plan(**given, causal=True, **latent.SIZES)


@pytest.mark.parametrize("at", ["q", "cache", "k", "v", "q_nope", "q_pe", "ckv_cache"])
def test_an_lse_over_what_is_read(at):
    kind = latents if at in ("q_nope", "q_pe", "ckv_cache") else ragged if at in ("k", "v") else paged
    names = {latents: ("q_nope", "q_pe", "ckv_cache"), ragged: ("q", "k", "v"), paged: ("q", "cache")}[kind]
    wrapper, given, call = kind(Batch())
    plan(wrapper, given)
    rows = len(call[0])
    taken = call[names.index(at)]
    if not taken.is_contiguous():  # a part of one buffer
        taken = taken.as_strided((taken.numel(),), (1,))
    before = [x.clone() for x in call]
    with pytest.raises(AttentionError, match=f"lse shares memory with .*{at}"):
        wrapper.run(*call, lse=taken.flatten()[: rows * HEADS].view(rows, HEADS), return_lse=True)
    assert all(torch.equal(x.nan_to_num(), old.nan_to_num()) for x, old in zip(call, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.int32, torch.float16, torch.float8_e4m3fn, torch.float64])
def test_an_lse_of_another_dtype(dtype):
    wrapper, given, call = ragged(Batch())
    wrapper.plan(*given)
    with pytest.raises(AttentionError, match=f"lse has dtype {dtype}; it must be torch.float32"):
        wrapper.run(*call, lse=torch.zeros(len(call[0]), HEADS).to(dtype), return_lse=True)


def test_an_lse_of_queries_that_require_gradients():
    """It would become a part of the graph, and be refused by the next call."""
    wrapper, given, (q, k, v) = ragged(Batch())
    wrapper.plan(*given)
    lse = torch.zeros(len(q), HEADS)
    with pytest.raises(AttentionError, match="lse is given; there is no gradient through it"):
        wrapper.run(q.requires_grad_(), k, v, lse=lse, return_lse=True)
    assert not lse.requires_grad
    with torch.no_grad():
        assert wrapper.run(q, k, v, lse=lse, return_lse=True)[1] is lse


def test_states_whose_lse_is_no_real_number():
    v, s = torch.randn(3, HEADS, DIM), torch.zeros(3, HEADS)
    for dtype in (torch.int32, torch.complex64):
        with pytest.raises(AttentionError, match=f"^s_a has dtype {dtype}; it must be a floating dtype"):
            flashinfer.merge_state(v, s.to(dtype), v, s)
    for dtype in (torch.float16, torch.float8_e4m3fn):
        with pytest.raises(AttentionError, match=f"s has dtype {dtype}; it is overwritten and must be torch.float32"):
            flashinfer.merge_state_in_place(v, s.to(dtype), v.clone(), s)


def test_states_are_refused_by_the_names_of_their_arguments():
    v, s = torch.randn(3, HEADS, DIM), torch.zeros(3, HEADS)
    rule = "it must be torch.float16 or torch.bfloat16 or torch.float32"
    several = torch.zeros(3, 2, HEADS, DIM), torch.zeros(3, 2, HEADS)
    for call, given, words in (
        (flashinfer.merge_state, (v.double(), s, v.double(), s), f"- v_a has dtype torch.float64; {rule}"),
        (flashinfer.merge_state, (v, s, v[:2], s[:2]), f"v_b has shape (2, {HEADS}, {DIM}); it must be that of v_a"),
        (flashinfer.merge_state, (v, s, v.half(), s), "v_b has dtype torch.float16; it must be that of v_a"),
        (flashinfer.merge_state, (v, s, v, s[:2]), f"s_b has shape (2, {HEADS}); it must be (3, {HEADS}), by"),
        (flashinfer.merge_state, (v, s, v, 1.0), "s_b is a float"),
        (flashinfer.merge_state_in_place, (v, s, v.double(), s), f"- v_other has dtype torch.float64; {rule}"),
        (flashinfer.merge_state_in_place, (v, s, v, s.int()), "s_other has dtype torch.int32; it must be a floating"),
        (flashinfer.merge_states, (several[0].double(), several[1]), f"v has dtype torch.float64; {rule}"),
        (flashinfer.merge_states, (torch.zeros(3, 0, HEADS, DIM), torch.zeros(3, 0, HEADS)), "v has 0 states;"),
        (flashinfer.merge_states, (v.double()[:, None].expand(3, 17, HEADS, DIM), torch.zeros(3, 17, HEADS)), rule),
    ):
        with pytest.raises(AttentionError) as error:
            call(*given)
        assert words in str(error.value) and "lse_" not in str(error.value) and "out_" not in str(error.value)


def test_arguments_of_other_kinds():
    number = torch.tensor(5)
    for wrapper, names in (
        (flashinfer.BatchDecodeWithPagedKVCacheWrapper, ("paged_kv_indptr_buffer", "paged_kv_indices_buffer")),
        (flashinfer.BatchPrefillWithPagedKVCacheWrapper, ("qo_indptr_buf", "paged_kv_indices_buf")),
    ):
        for name in names:
            buffers = {each: offsets((1, 1)) for each in names} | {name: number}
            with pytest.raises(AttentionError, match=rf"{name} has shape \(\); it must have rank 1"):
                wrapper(WORKSPACE, use_cuda_graph=True, **buffers)
    with pytest.raises(AttentionError, match=r"indptr has dtype torch\.complex64; it must be torch\.int32"):
        flashinfer.segment_packbits(torch.ones(3), torch.tensor([0, 3]).to(torch.complex64))
    wrapper, given, call = latents(None)
    wrapper.plan(*given, **latent.SIZES, lse_mode=torch.zeros(2).numpy())
    with pytest.raises(AttentionError, match="plan was called with lse_mode"):
        wrapper.run(*call, return_lse=True)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf"), 1e300, 10**40, 1e-60])
def test_a_factor_of_8_bits_that_is_no_scale(factor):
    """A number is checked on the host, so also where tensors are on a card."""
    wrapper, given, (q, cache) = decode(batch_of(decode))
    wrapper.plan(*given)
    with pytest.raises(AttentionError, match=r"k_scale is .*positive and finite"):
        wrapper.run(q, cache.to(torch.float8_e4m3fn), k_scale=factor)
